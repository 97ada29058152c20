"""A pass fails after the engine has counted on it: its blocks can be matched, and nobody reads what is not there."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.batch_rows import FAILED, NO_TOKEN
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.runner import MAX_RETRIES
from fastdeploy_kvcache_v1.model.step import StepResult

from .host_tasks import prefill
from .runners import LONG, PROMPT, decode_alone, fail_next_pass, run, tokens, with_swaps


@pytest.fixture
def runner(make_runner):
    return make_runner()


def test_what_was_not_computed_does_not_reach_the_host(make_runner):
    reports = []
    runner = make_runner(tell_copies=reports.append)
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    fail_next_pass(runner)
    assert run(runner, 1) == [FAILED]
    runner.insert_tasks([with_swaps(prefill(0, "b", PROMPT[:4], [9]), 0, evict=((0, 8), (0, 1)))])
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
    assert runner._controller.failed_slots(range(16)) == [2, 3], "and no more: what b computed is read"
    assert tokens(run(runner, 3, rows=3, row=2)) == decode_alone(model, LONG, 2)
