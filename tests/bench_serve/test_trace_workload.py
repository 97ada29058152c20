"""Scaled-down prompts keep what matters of the trace: who shares which prefix."""

import pytest

from fastdeploy_kvcache_v1.bench_serve.trace_workload import Scale, scaled
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.replay.trace import TraceRequest


def test_equal_ids_become_equal_prefixes_and_nothing_else_does():
    one = TraceRequest(1, 0, 3 * 512, 64, (0, 1, 2))
    other = TraceRequest(2, 2_500, 2 * 512 + 100, 640, (0, 1, 7))
    first, second = scaled([one, other], Scale(divisor=8, speedup=2.0))
    assert len(prompt(first)) == 3 * 64
    assert len(prompt(second)) == (2 * 512 + 100) // 8
    assert prompt(first)[: 2 * 64] == prompt(second)[: 2 * 64]
    assert prompt(first)[2 * 64 : 2 * 64 + 12] != prompt(second)[2 * 64 :]
    assert (first.turns[0].max_tokens, second.turns[0].max_tokens) == (8, 16)
    assert (first.start_s, second.start_s) == (0.0, 1.25)
    assert scaled([one], Scale(divisor=8)) == [first]


def prompt(session):
    (turn,) = session.turns
    return turn.tokens


def test_long_prompts_keep_their_beginning_and_short_ones_a_token():
    long, short = TraceRequest(1, 0, 5 * 512, 1, (0, 1, 2, 3, 4)), TraceRequest(2, 0, 3, 0, (9,))
    cut, tiny = scaled([long, short], Scale(divisor=1, max_prompt_tokens=700))
    whole = scaled([long], Scale(divisor=1, max_prompt_tokens=5_000))[0]
    assert prompt(cut) == prompt(whole)[:700]
    assert len(prompt(scaled([short], Scale(divisor=512))[0])) == 1
    assert (len(prompt(tiny)), tiny.turns[0].max_tokens) == (3, 1)


@pytest.mark.parametrize("wrong", [{"divisor": 0}, {"max_prompt_tokens": 0}, {"max_output_tokens": 0}, {"speedup": 0}])
def test_sizes_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match="--"):
        Scale(**wrong)


def test_a_divisor_must_divide_what_an_id_stands_for():
    with pytest.raises(ConfigError, match="--divide must divide the 16 tokens of a hash id of the trace, got 32"):
        scaled([TraceRequest(1, 0, 16, 1, (0,), tokens_per_id=16)], Scale(divisor=32))


def test_tokens_that_no_id_names_are_sent_too_and_equal_no_others():
    first, second = (TraceRequest(line, 0, 30, 1, (5,), tokens_per_id=16) for line in (1, 2))
    one, two = (prompt(session) for session in scaled([first, second], Scale(divisor=1)))
    assert (len(one), one[:16]) == (30, two[:16])
    assert one[16:] != two[16:]
