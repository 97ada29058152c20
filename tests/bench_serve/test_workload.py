"""Scaled-down prompts keep what matters of the trace: who shares which prefix."""

import pytest

from fastdeploy_kvcache_v1.bench_serve.workload import Scale, scaled
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.replay.trace import TraceRequest


def test_equal_ids_become_equal_prefixes_and_nothing_else_does():
    one = TraceRequest(1, 0, 3 * 512, 64, (0, 1, 2))
    other = TraceRequest(2, 2_500, 2 * 512 + 100, 640, (0, 1, 7))
    first, second = scaled([one, other], Scale(divisor=8))
    assert len(first.prompt) == 3 * 64
    assert len(second.prompt) == (2 * 512 + 100) // 8
    assert first.prompt[: 2 * 64] == second.prompt[: 2 * 64]
    assert first.prompt[2 * 64 : 2 * 64 + 12] != second.prompt[2 * 64 :]
    assert (first.max_tokens, second.max_tokens) == (8, 16)
    assert (first.seconds, second.seconds) == (0.0, 2.5)
    assert scaled([one], Scale(divisor=8)) == [first]


def test_long_prompts_keep_their_beginning_and_short_ones_a_token():
    long, short = TraceRequest(1, 0, 5 * 512, 1, (0, 1, 2, 3, 4)), TraceRequest(2, 0, 3, 0, (9,))
    cut, tiny = scaled([long, short], Scale(divisor=1, max_prompt_tokens=700))
    whole = scaled([long], Scale(divisor=1, max_prompt_tokens=5_000))[0]
    assert cut.prompt == whole.prompt[:700]
    assert len(scaled([short], Scale(divisor=512))[0].prompt) == 1
    assert (len(tiny.prompt), tiny.max_tokens) == (3, 1)


@pytest.mark.parametrize("wrong", [{"divisor": 0}, {"divisor": 7}, {"max_prompt_tokens": 0}, {"max_output_tokens": 0}])
def test_sizes_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match="--"):
        Scale(**wrong)
