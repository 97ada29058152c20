"""Two ranks of the runner: the tokens of one, told by rank 0, whatever becomes of a copy on one of them."""

import threading
from copy import deepcopy
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker import runner as runner_module
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.runner import CpuModelRunner, RunnerConfig
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.embedded.engine.family_engine import rank_group
from tests.model.test_ranks import on_all

from .host_tasks import ABORT, other, prefill
from .test_runner import BLOCK, PROMPT, Messages, decode_alone, model, swap_out_and_in, with_swaps

__all__ = ["model"]


@pytest.fixture(scope="module")
def expected(model):
    return decode_alone(model, PROMPT, 6)


class Pair:
    """Both ranks, each step at the same time, as FastDeploy's event loop would drive them."""

    def __init__(self, model, directory, copy_faults):
        self.ranks = rank_group(2)
        self._sender, self.reports = Messages(), [[], []]
        self.messages = self._sender.sent
        self.runners = []
        for rank in self.ranks:
            config = RunnerConfig(Path(model), BLOCK, num_host_blocks=8, cache_dtype="float32", copy_faults=copy_faults)
            runner = CpuModelRunner(
                config,
                self._sender if rank.rank == 0 else None,
                stats_directory=directory,
                tell_copies=self.reports[rank.rank].append,
                ranks=rank,
            )
            self.runners.append(runner)
        self.each(lambda runner: runner.load_weights())
        self.each(lambda runner: runner.create_caches(16))

    def each(self, action):
        outcomes = on_all(self.runners, action)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def insert_tasks(self, tasks):
        for runner in self.runners:
            runner.insert_tasks(deepcopy(tasks))  # each process has its own

    def execute(self, num_rows):
        self.each(lambda runner: runner.execute(num_rows))

    def tokens(self, steps):
        first = len(self.messages)
        for _ in range(steps):
            self.execute(1)
        return [message[0][0] for message in self.messages[first:]]

    def failures(self):
        return [sum(not result.ok for report in reports for result in report.transfers) for reports in self.reports]

    def close(self):
        self.each(lambda runner: runner._controller.drain(30))
        for runner in self.runners:
            runner.drop_caches()
            runner._controller.free()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def make_pair(model, tmp_path):
    pairs = []

    def make(copy_faults=""):
        pairs.append(Pair(model, tmp_path, copy_faults))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def test_the_tokens_of_one_rank_are_told_once(make_pair, expected):
    pair = make_pair()
    pair.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert pair.tokens(6) == expected


def test_blocks_go_to_the_host_and_back_on_both(make_pair, expected, tmp_path):
    pair = make_pair()
    swap_out_and_in(pair)
    assert pair.tokens(6) == expected
    assert [runner._copies.swap_in.blocks for runner in pair.runners] == [2, 2]
    assert {path.name for path in tmp_path.glob("*.json")} == {"cpu_worker.json", "cpu_worker1.json"}


def test_a_pass_that_loads_is_timed_on_no_rank(make_pair):
    """It may have waited for a rank that waited for its copies, and does not know how long."""
    pair = make_pair()
    swap_out_and_in(pair)
    pair.tokens(2)
    for reports in pair.reports:
        assert [prefill.num_tokens for report in reports for prefill in report.prefills] == [len(PROMPT), 24]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_that_fails_on_one_rank_is_computed_again_on_both(make_pair, expected, failing):
    pair = make_pair(f'{{"ranks": [{failing}], "fail": {{"input": [0]}}}}')
    swap_out_and_in(pair)
    assert [token for token in pair.tokens(7) if token >= 0] == expected
    assert pair.failures() == [failing == 0, failing == 1]


@pytest.mark.parametrize("open_on", [0, 1])
def test_ranks_agree_whether_there_is_anything_to_do(make_pair, monkeypatch, open_on):
    """Copies end at different times; FastDeploy's idle ranks meet at another barrier than busy ones."""
    may_end = threading.Event()

    def make_runtime(faults, rank):
        return CpuRuntime(delay=lambda stream: rank != open_on or may_end.wait(60))

    monkeypatch.setattr(runner_module, "make_runtime", make_runtime)
    pair = make_pair()
    pair.insert_tasks([prefill(0, "a", PROMPT, [0, 1, 2])])
    pair.tokens(1)
    pair.insert_tasks([with_swaps(other(ABORT, 0, "a"), 0, evict=((0, 1), (3, 4)))])
    pair.tokens(1)
    pair.runners[1 - open_on]._controller.drain(30)
    pair.tokens(1)  # which reports the copy on the rank that has ended it
    assert [runner._steps.has_open_copies for runner in pair.runners] == [open_on == 0, open_on == 1]
    assert pair.each(lambda runner: runner.not_need_stop()) == [True, True]
    may_end.set()
    pair.runners[open_on]._controller.drain(30)
    pair.tokens(1)
    assert pair.each(lambda runner: runner.not_need_stop()) == [False, False]
