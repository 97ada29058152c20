"""A copy from the host fails under a prompt in chunks, or beside a block that a decode server may read."""

import time
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.runner import CpuModelRunner, RunnerConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_rank import PrefillRank
from tests.fastdeploy_integration.cpu_worker.host_tasks import ABORT, other, prefill
from tests.fastdeploy_integration.cpu_worker.test_runner import (
    BLOCK,
    PROMPT,
    Messages,
    decode_alone,
    make_runner,  # noqa: F401  # a fixture
    run,
    with_swaps,
)

from .test_role_runners import Pair, model, tokens_of  # noqa: F401  # `model` is a fixture

ALL_FAIL = '{"fail": {"input": "all"}}'
LONG = PROMPT[:16] + list(range(50, 66))
"""Four blocks, of which PROMPT has the first two."""
LAYER_TIMEOUT_S = 30.0


class FaultyPair(Pair):
    """No copy from the host of its prefill runner arrives."""

    def _runner(self, model, directory, role):  # noqa: F811
        directory.mkdir()
        is_prefill = isinstance(role, PrefillRank)
        config = RunnerConfig(
            Path(model),
            BLOCK,
            num_host_blocks=8 if is_prefill else 0,
            cache_dtype="float32",
            copy_faults=ALL_FAIL if is_prefill else "",
        )
        runner = CpuModelRunner(config, Messages(), stats_directory=directory, transfers=role)
        runner.load_weights()
        runner.create_caches(16)
        runner.messages = runner._sender.sent
        return runner


@pytest.fixture
def pair(model, tmp_path):  # noqa: F811
    made = FaultyPair(model, tmp_path)
    yield made
    made.close()


def plain(*args, **chunk):
    task = prefill(*args, **chunk)
    task.ic_req_data = task.disaggregate_info = None
    return task


def back_up(runner):
    """The first two blocks of PROMPT are in host slots 3 and 0 afterwards, and nowhere else."""
    tasks = (
        plain(0, "z", PROMPT, [0, 1, 2]),
        with_swaps(other(ABORT, 0, "z"), 0, evict=((0, 1), (3, 0))),
        plain(0, "y", [50] * 24, [0, 1, 2]),
        other(ABORT, 0, "y"),
    )
    for task in tasks:
        runner.insert_tasks([task])
        runner.execute(1)


@pytest.mark.parametrize("next_chunk_is_queued", [False, True])
def test_a_chunk_whose_copy_failed_is_computed_before_the_next_one(make_runner, model, next_chunk_is_queued):  # noqa: F811
    """FastDeploy has sent the next chunk before it can know. Another request computes the block that both share."""
    runner = make_runner(ALL_FAIL)
    back_up(runner)
    whole = with_swaps(prefill(0, "b", PROMPT, [7, 5, 6, 8], start=16), 1, swap_in=((3, 0), (7, 5)), previous=0)
    runner.insert_tasks([whole, prefill(1, "a", LONG, [7, 5, 9, 10, 11], start=16, end=24)])
    runner.execute(2)
    assert runner.messages[-1][0] == [-1, -1], "both are to be computed again"
    if not next_chunk_is_queued:
        runner.execute(2)
    runner.insert_tasks([prefill(1, "a", LONG, [7, 5, 9, 10, 11], start=24)])
    for _ in range(3):
        runner.execute(2)
    alone = make_runner()
    alone.insert_tasks([prefill(0, "r", LONG, [7, 5, 9, 10, 11])])
    run(alone, 1)
    for name, tensor in runner._controller.caches.items():
        expected = alone._controller.caches[name].numpy()
        assert all(np.array_equal(tensor.numpy()[slot], expected[slot]) for slot in (7, 5, 9, 10)), name
    first = [next(rows[row] for rows, _ in runner.messages if len(rows) == 2 and rows[row] >= 0) for row in (0, 1)]
    assert first == [*decode_alone(model, PROMPT, 1), *decode_alone(model, LONG, 1)]


def test_a_decode_server_never_reads_a_chunk_that_was_not_computed(pair, model):  # noqa: F811
    runner = pair.prefill
    back_up(runner)
    whole = with_swaps(pair.prefill_task("b", PROMPT, (7, 5, 6), start=16), 1, swap_in=((3, 0), (7, 5)), previous=0)
    runner.insert_tasks([whole, pair.prefill_task("a", LONG, (7, 5, 9, 10), row=1, start=16, end=24)])
    runner.execute(2)
    runner.insert_tasks([pair.prefill_task("a", LONG, (7, 5, 9, 10), row=1, start=24)])
    runner.execute(2)
    runner.execute(2)
    prompt = [*LONG, 70, 71]  # its prefix is cached since those batches were sent
    pair.fetch([3, 1, 8, 4, 6], "c")
    runner.insert_tasks([pair.prefill_task("c", prompt, (7, 5, 9, 10, 12), row=2, start=32)])
    runner.execute(3)
    first = [runner.messages[-1][0][2]]
    pair.until(lambda: pair.channel.news and ("c", None) in pair.told)
    pair.decode.insert_tasks([prefill(0, "c", prompt, [3, 1, 8, 4, 6, 9], start=34, outputs=first)])
    assert first + tokens_of(pair.decode, 5) == decode_alone(model, prompt, 6)


def test_a_retry_leaves_blocks_alone_that_a_lease_holds(pair):
    """It would wait for the lease, which ends on the thread that waits."""
    runner = pair.prefill
    for task in (
        plain(0, "z", LONG, [0, 1, 2, 4]),
        with_swaps(other(ABORT, 0, "z"), 0, evict=((2,), (3,))),
        pair.prefill_task("c", PROMPT, (0, 1, 6), start=16),
    ):
        runner.insert_tasks([task])
        runner.execute(1)
    shares = pair.prefill_task("a", LONG, (0, 1, 9, 10), row=1, start=24)
    runner.insert_tasks([with_swaps(shares, 1, swap_in=((3,), (9,)), previous=0)])
    runner.execute(2)
    pair.fetch([3, 1, 8], "c")
    longest = 0.0
    while not any(len(rows) > 1 and rows[1] >= 0 for rows, _ in runner.messages):
        began = time.monotonic()
        pair.turn()
        runner.execute(2)
        longest = max(longest, time.monotonic() - began)
        assert len(runner.messages) < 1000, pair.told
    assert longest < LAYER_TIMEOUT_S, "no step waited for the lease until it gave up"
