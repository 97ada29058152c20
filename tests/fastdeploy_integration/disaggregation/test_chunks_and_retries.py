"""A copy from the host fails under a prompt in chunks, or beside a block that a decode server may read."""

import pytest

from fastdeploy_kvcache_v1.errors import LayerSwapTimeoutError
from fastdeploy_kvcache_v1.worker.runtime import cpu
from tests.fastdeploy_integration.cpu_worker.host_tasks import ABORT, other, prefill
from tests.fastdeploy_integration.cpu_worker.runners import LONG, PROMPT, back_up, decode_alone, run, tokens, with_swaps

from .role_pairs import plain

ALL_FAIL = '{"fail": {"input": "all"}}'


@pytest.fixture
def pair(make_pair):
    return make_pair(copy_faults=ALL_FAIL)


def test_a_decode_server_never_reads_a_chunk_that_was_not_computed(pair, model):
    runner = pair.prefill
    back_up(runner)
    whole = with_swaps(pair.prefill_task("c", PROMPT, (7, 5, 6), start=16), 1, swap_in=((3, 4), (7, 5)), previous=0)
    runner.insert_tasks([whole, pair.prefill_task("d", LONG, (7, 5, 9, 10), row=1, start=16, end=24)])
    runner.execute(2)
    runner.insert_tasks([pair.prefill_task("d", LONG, (7, 5, 9, 10), row=1, start=24)])
    runner.execute(2)
    runner.execute(2)
    prompt = [*LONG, 70, 71]  # its prefix is cached since those batches were sent
    pair.fetch([3, 1, 8, 4, 6], "e")
    runner.insert_tasks([pair.prefill_task("e", prompt, (7, 5, 9, 10, 12), row=2, start=32)])
    first = run(runner, 1, rows=3, row=2)
    pair.until(lambda: pair.channel.news and ("e", None) in pair.told)
    pair.decode.insert_tasks([prefill(0, "e", prompt, [3, 1, 8, 4, 6, 9], start=34, outputs=first)])
    assert first + run(pair.decode, 5) == decode_alone(model, prompt, 6)


def test_a_retry_leaves_blocks_alone_that_a_lease_holds(pair, monkeypatch):
    """It would wait for the lease, which ends on the thread that waits, until it gives up."""
    given_up = []
    monkeypatch.setattr(cpu, "LayerSwapTimeoutError", lambda why: given_up.append(why) or LayerSwapTimeoutError(why))
    runner = pair.prefill
    for task in (
        plain(pair.prefill_task("z", LONG, [0, 1, 2, 4])),
        with_swaps(other(ABORT, 0, "z"), 0, evict=((2,), (3,))),
        pair.prefill_task("c", PROMPT, (0, 1, 6), start=16),
    ):
        runner.insert_tasks([task])
        runner.execute(1)
    shares = pair.prefill_task("a", LONG, (0, 1, 9, 10), row=1, start=24)
    runner.insert_tasks([with_swaps(shares, 1, swap_in=((3,), (9,)), previous=0)])
    runner.execute(2)
    pair.fetch(name="c")
    while not given_up and not any(tokens(rows[1:]) for rows, _ in runner.messages):
        pair.turn()
        runner.execute(2)
        assert len(runner.messages) < 1000, pair.told
    assert given_up == []
