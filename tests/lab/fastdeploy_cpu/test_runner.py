"""The runner, on one rank and on two; the host is a few tasks. The reference is the model alone."""

import json
import threading
from copy import deepcopy
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.weight_updates import CLEARED, NORMAL
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import runner as runner_module
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.batch_rows import FAILED, NO_TOKEN
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.runner import MAX_RETRIES, stats_file
from fastdeploy_kvcache_v1.lab.model.directory import write_random_directory, write_seed
from fastdeploy_kvcache_v1.lab.model.step import StepResult
from fastdeploy_kvcache_v1.worker.ops.copies import cpu_paths
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.lab.model.test_ranks import on_all
from tests.lab.server.engine.family_engine import rank_group

from .host_tasks import ABORT, other, prefill
from .runners import (
    LONG,
    PROMPT,
    decode_alone,
    fail_next_pass,
    injected,
    run,
    start_runner,
    swap_out_and_in,
    tokens,
    with_swaps,
)


class Group:
    """All ranks, each step at the same time, as FastDeploy's event loop drives them. Rank 0 tells the tokens."""

    def __init__(self, model, directory, num_ranks, copy_faults=""):
        self.ranks, self.reports = rank_group(num_ranks), [[] for _ in range(num_ranks)]
        with injected(copy_faults):
            self.runners = on_all(self.ranks, lambda rank: self._start(model, directory, rank))
        self.messages = self.runners[0].messages

    def _start(self, model, directory, rank):
        told = self.reports[rank.rank].append
        sends = rank.rank == 0
        return start_runner(model, directory, ranks=rank, tell_copies=told, sends=sends)

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

    def finish_copies(self):
        self.each(lambda runner: runner._controller.transfers.drain(30))

    def of_reports(self, field):
        return [[each for report in reports for each in getattr(report, field)] for reports in self.reports]

    def close(self):
        self.finish_copies()
        for runner in self.runners:
            runner.drop_caches()
            runner._controller.free()
        for rank in self.ranks if len(self.ranks) > 1 else ():
            rank.close()


@pytest.fixture
def make_group(model, tmp_path):
    groups = []

    def make(num_ranks=2, copy_faults=""):
        groups.append(Group(model, tmp_path, num_ranks, copy_faults))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_tokens_are_those_of_the_model_alone_and_told_once(make_group, expected, num_ranks):
    group = make_group(num_ranks)
    group.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(group, 6) == expected
    assert len(group.messages) == 6


def test_a_sequence_that_cannot_be_computed_is_given_up(make_runner):
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", PROMPT, [0, 99, 2])])
    assert run(runner, 1) == [FAILED]
    assert not runner.not_need_stop()


def test_a_lost_batch_ends_the_worker(make_runner):
    runner = make_runner()
    with pytest.raises(TransferError, match="a batch was lost"):
        runner.insert_tasks([with_swaps(prefill(0, "a", PROMPT, range(5)), 4, swap_out=((9,), (0,)), previous=3)])


def test_sleeping_computes_nothing_and_new_weights_are_read(make_runner, tmp_path, expected):
    path = write_random_directory(tmp_path / "model")
    runner = make_runner(path=path)
    runner.drop_weights()
    assert runner.is_sleeping
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, 1) == []
    runner.drop_caches()
    write_seed(path, 1)
    runner.restore(weights=True, caches=True)
    assert not runner.is_sleeping
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, 6) == decode_alone(path, PROMPT, 6) != expected


@pytest.mark.parametrize("keep", [True, False])
def test_host_memory_while_the_caches_are_away(make_runner, monkeypatch, expected, keep):
    freed, free_host = [], CpuRuntime.free_host
    monkeypatch.setattr(
        CpuRuntime, "free_host", lambda self, buffer: freed.append(buffer.nbytes) or free_host(self, buffer)
    )
    runner = make_runner(keep_host_memory=keep)
    swap_out_and_in(runner)
    runner.drop_caches()
    assert freed == ([] if keep else [8 * runner.block_bytes])
    runner.restore(weights=True, caches=True)
    assert not runner.not_need_stop(), "no request outlives the caches"
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, 6) == expected


def test_weights_go_and_come_back(make_runner, tmp_path):
    """By the host's legacy API: sequences, and copies that wait, are forgotten; only the status is told."""
    path, told = write_random_directory(tmp_path / "model"), []
    runner = make_runner(path=path)
    runner._tell_weights_status = lambda port, status: told.append((port, status, runner.is_sleeping))
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert len(run(runner, 2)) == 2
    runner.insert_tasks([with_swaps(prefill(1, "b", PROMPT, range(5, 10)), 0, swap_in=((3,), (5,)))])
    runner.clear_requests()
    runner.clear_parameters(17)
    assert not runner.not_need_stop()
    write_seed(path, 5)
    runner.clear_requests()
    runner.update_parameters(17)
    assert told == [(17, CLEARED, True), (17, NORMAL, False)]
    assert not runner.not_need_stop()
    assert len(runner.messages) == 2
    runner.insert_tasks([with_swaps(prefill(0, "a", PROMPT, range(5)), 7)])
    assert run(runner, 6) == decode_alone(path, PROMPT, 6)


def test_min_tokens_keeps_end_tokens_out(make_runner, expected):
    runner = make_runner()
    task = prefill(0, "a", PROMPT, range(5), min_tokens=6)
    task.eos_token_ids = [expected[2]]
    runner.insert_tasks([task])
    assert expected[2] not in run(runner, 6)


def test_storage_of_device_blocks_hears_of_passes(make_runner):
    reports, used = [], []
    storage = SimpleNamespace(uses_device_tier=True, host_trailer_bytes=0, use=used.append, let_go=lambda: None)
    runner = make_runner(tell_copies=reports.append, storage=storage)
    assert used == [runner._controller]
    assert not runner.not_need_stop()
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (-1, True)
    assert reports[-1].copies.paths == cpu_paths(), "a worker without work says how it copies"
    runner.insert_tasks([with_swaps(prefill(0, "a", PROMPT, range(4)), 0)])
    assert runner.not_need_stop()
    runner.execute(1)
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (0, False), "the row goes on"
    runner.insert_tasks([other(ABORT, 0, "a")])
    runner.execute(1)
    assert not runner.not_need_stop()
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (0, True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_go_to_the_host_and_back(make_group, expected, tmp_path, num_ranks):
    group = make_group(num_ranks)
    swap_out_and_in(group)
    assert run(group, 6) == expected
    group.finish_copies()
    run(group, 1)
    for rank in range(num_ranks):
        copies = json.loads(stats_file(tmp_path, rank).read_text())
        assert [(copies[way]["blocks"], copies[way]["failures"]) for way in ("swap_out", "swap_in")] == [(2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("num_ranks", "faults", "num_failed"),
    [
        (1, '{"fail": {"swap_in": "all"}}', [1]),
        (1, '{"fail": {"swap_out": "all"}}', [2]),
        (1, '{"max_delay_ms": 5}', [0]),
        (2, '{"ranks": [0], "fail": {"swap_in": [0]}}', [1, 0]),
        (2, '{"ranks": [1], "fail": {"swap_in": [0]}}', [0, 1]),
    ],
)
def test_a_failed_copy_costs_a_step_but_no_token(make_group, expected, num_ranks, faults, num_failed):
    """One that fails on one rank is computed again on all."""
    group = make_group(num_ranks, faults)
    swap_out_and_in(group)
    assert tokens(run(group, 8))[:6] == expected
    assert [sum(not each.ok for each in copies) for copies in group.of_reports("transfers")] == num_failed


@pytest.mark.parametrize("open_on", [0, 1])
def test_ranks_agree_whether_there_is_anything_to_do(make_group, monkeypatch, open_on):
    """Copies end at different times; FastDeploy's idle ranks meet at another barrier than busy ones."""
    may_end = threading.Event()

    def make_runtime(faults, rank):
        return CpuRuntime(delay=lambda stream: rank != open_on or may_end.wait(60))

    monkeypatch.setattr(runner_module, "make_runtime", make_runtime)
    group = make_group()
    group.insert_tasks([prefill(0, "a", PROMPT, [0, 1, 2])])
    run(group, 1)
    group.insert_tasks([with_swaps(other(ABORT, 0, "a"), 0, swap_out=((0, 1), (3, 4)))])
    run(group, 1)
    group.runners[1 - open_on]._controller.transfers.drain(30)
    run(group, 1)  # which reports the copy on the rank that has ended it
    assert [runner._steps.has_open_copies for runner in group.runners] == [open_on == 0, open_on == 1]
    assert group.each(lambda runner: runner.not_need_stop()) == [True, True]
    may_end.set()
    group.runners[open_on]._controller.transfers.drain(30)
    run(group, 1)
    assert group.each(lambda runner: runner.not_need_stop()) == [False, False]


# ---- a pass fails after the engine has counted on it: its blocks can be matched, and nobody reads what is not there


@pytest.fixture
def runner(make_runner):
    return make_runner()


def test_what_was_not_computed_does_not_reach_the_host(make_runner):
    reports = []
    runner = make_runner(tell_copies=reports.append)
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    fail_next_pass(runner)
    assert run(runner, 1) == [FAILED]
    runner.insert_tasks([with_swaps(prefill(0, "b", PROMPT[:4], [9]), 0, swap_out=((0, 8), (0, 1)))])
    run(runner, 2)
    while runner.not_need_stop() and runner._steps.has_open_copies:
        runner.execute(1)
    copies = [result for report in reports for result in report.transfers]
    assert [(result.step, result.ok) for result in copies] == [(0, False)]


def test_a_request_that_is_always_to_be_computed_again_is_given_up(runner, monkeypatch):
    def retry(batch):
        return StepResult(retry={each.request_id: "a copy failed" for each in batch.requests})

    monkeypatch.setattr(runner._steps, "run", retry)
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, MAX_RETRIES + 1) == [NO_TOKEN] * MAX_RETRIES + [FAILED]


# ---- a chunk fails, and FastDeploy has sent the next one before it can know


def first_chunk_fails(runner, prompt, *others):
    runner.insert_tasks([prefill(0, "a", prompt, range(2), end=16), *others])
    fail_next_pass(runner)


def test_a_request_ends_once_nothing_of_it_is_on_its_way(runner, expected):
    first_chunk_fails(runner, LONG)
    assert run(runner, 1) == [NO_TOKEN]
    assert not runner.not_need_stop()
    runner.insert_tasks([prefill(0, "a", LONG, range(5), start=16)])
    assert run(runner, 1) == [FAILED]
    assert not runner.not_need_stop()
    runner.insert_tasks([prefill(0, "a", PROMPT, [0, 1, 7, 8], start=16)])  # comes again, and finds blocks of the first
    assert tokens(run(runner, 5)) == expected[:4]


def test_nobody_reads_a_chunk_that_was_not_computed(runner, model, expected):
    """Another request has repaired the chunk that failed when the next one comes, which stays undone."""
    first_chunk_fails(runner, LONG)
    run(runner, 1)
    runner.insert_tasks([prefill(1, "b", PROMPT, [0, 1, 7, 8], start=16)])
    assert tokens(run(runner, 3, rows=3, row=1)) == expected[:2]
    runner.insert_tasks([prefill(0, "a", LONG, range(5), start=16), prefill(2, "c", LONG, [0, 1, 2, 9, 10], start=24)])
    assert runner._controller.transfers.failed_slots(range(16)) == [2, 3], "and no more: what b computed is read"
    assert tokens(run(runner, 3, rows=3, row=2)) == decode_alone(model, LONG, 2)
