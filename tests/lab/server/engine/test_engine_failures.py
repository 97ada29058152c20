"""The engine core when copies or computations fail: no wrong token, nothing counted as cached that was computed."""

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.contract.messages import CopyResult, RankCopies
from fastdeploy_kvcache_v1.lab.model.step import StepResult, WorkerReport
from fastdeploy_kvcache_v1.lab.server.engine.engine_core import MAX_COPY_FAILURES
from fastdeploy_kvcache_v1.lab.server.engine.generation import Failure
from tests.lab.server.harness import Harness, expected_outputs, small


def test_request_is_given_up_after_too_many_failed_copies():
    harness = Harness(small())
    recorder = harness.submit("a", range(10), 4)
    for attempt in range(MAX_COPY_FAILURES + 1):
        assert not recorder.events, attempt
        harness.core.step()
        batch = harness.sent.pop()
        assert batch.requests[0].start == 0
        harness.core.on_step_result(StepResult(retry={"a": "the copy was torn"}))
    assert recorder.failure.status == 500
    assert "the copy was torn" in recorder.failure.message
    harness.run()


def test_failed_computation_ends_only_its_request():
    harness = Harness(small())
    bad, good = harness.submit("bad", range(6), 3), harness.submit("good", range(50, 56), 3)
    harness.core.step()
    result = harness.worker.run(harness.sent.pop())
    harness.core.on_step_result(
        StepResult(tokens={"good": result.tokens["good"]}, errors={"bad": "division by zero"}, report=result.report)
    )
    assert bad.failure == Failure(500, "division by zero")
    harness.run()
    assert good.tokens == expected_outputs(range(50, 56), 3)


def test_a_client_is_not_told_that_a_failed_swap_in_was_cached():
    harness = Harness(
        small(num_device_blocks=8, write_policy=WritePolicy.WRITE_THROUGH),
        fails="kv-swap_in",
    )
    prompt = list(range(18))
    for name, first in (("first", 0), ("others", 100), ("more", 200)):  # the others push it off the device
        harness.submit(name, range(first, first + 18), 2)
        harness.run()
    again = harness.submit("again", prompt, 2)
    harness.run()
    assert harness.core.counters.copies[0].swap_in.failures > 0
    assert again.tokens == expected_outputs(prompt, 2)
    assert again.cached == 0, "all of it was computed in the end"
    counters = harness.manager.stats().counters
    assert counters.host_hit_tokens == 4 * counters.failed_transfer_blocks == 16, "what failed was planned"
    assert (counters.requests_admitted, counters.query_tokens) == (5, 5 * 18), "it was admitted twice"


def test_own_chunks_found_after_a_failed_copy_are_no_cached_tokens():
    harness = Harness(small(num_device_blocks=32), max_num_batched_tokens=8)
    recorder = harness.submit("a", range(18), 2)
    harness.step()
    harness.core.step()
    harness.sent.pop()
    harness.core.on_step_result(StepResult(retry={"a": "the copy was torn"}))
    batch = harness.step()
    assert batch.requests[0].start == 8, "its first chunk was committed and is found again"
    harness.run()
    assert recorder.cached == 0
    assert recorder.tokens == expected_outputs(range(18), 2)


def test_cached_prefix_that_is_lost_and_computed_after_all_is_not_cached():
    harness = Harness(small(num_device_blocks=32))
    harness.submit("first", range(18), 1)
    harness.run()
    recorder = harness.submit("again", range(18), 3)
    assert harness.step().requests[0].start == 16
    harness.core.reset_cache()
    harness.scheduler.preempt(harness.scheduler.running[0])
    assert harness.step().requests[0].start == 0
    harness.run()
    assert recorder.cached == 0
    assert recorder.tokens == expected_outputs(range(18), 3)


def failed_swap_in(batch):
    """The report of a batch's swap-in that did not arrive."""
    (step,) = batch.swap_steps
    copy = step.swap_in
    return WorkerReport(
        (
            CopyResult(
                step.step, copy.source, copy.target, len(copy), 0, 0.0, target_slots=copy.target_slots, error="injected"
            ),
        )
    )


def step_with_a_swap_in():
    """A batch in flight in which "again" is served from the host and "new" is not."""
    harness = Harness(small(num_device_blocks=12, write_policy=WritePolicy.WRITE_THROUGH))
    for name, first in (("first", 0), ("others", 100), ("more", 200)):  # the others push it off the device
        harness.submit(name, range(first, first + 18), 2)
        harness.run()
    again, new = harness.submit("again", range(18), 2), harness.submit("new", [7, 8, 9], 2)
    harness.core.step()
    return harness, harness.sent.pop(), again, new


def test_requests_named_by_worker_or_by_failed_copies_repeat_the_step():
    """The worker names who could not be computed; who used blocks of a failed copy, the cache manager knows."""
    harness, batch, again, new = step_with_a_swap_in()
    wrong = dict.fromkeys(("again", "new"), (1,))
    harness.core.on_step_result(StepResult(tokens=wrong, retry={"new": "torn"}, report=failed_swap_in(batch)))
    assert harness.num_preemptions == 2
    assert (again.events, new.events) == ([], []), "neither token is taken"
    harness.run()
    assert again.tokens == expected_outputs(range(18), 2)
    assert new.tokens == expected_outputs([7, 8, 9], 2)


def test_what_a_worker_counts_is_known_from_its_last_report():
    """Also between two steps."""
    harness, counted = Harness(small()), RankCopies(exposed_wait_total_s=0.5)
    for report in (WorkerReport((), 0.5, copies=counted), WorkerReport()):
        harness.core.on_report(report)
    assert harness.core.counters.copies == [counted]


def test_failure_told_twice_preempts_once():
    """By a report while the batch is in flight, and by the answer to the batch."""
    harness, batch, recorder, new = step_with_a_swap_in()
    harness.core.on_report(failed_swap_in(batch))
    computed = harness.worker.run(batch).tokens
    harness.core.on_step_result(StepResult(tokens={"new": computed["new"]}, retry={"again": "a copy failed"}))
    assert harness.num_preemptions == 1
    harness.run()
    assert recorder.tokens == expected_outputs(range(18), 2)
    assert new.tokens == expected_outputs([7, 8, 9], 2)


def test_failed_backup_is_forgotten_and_counted():
    harness = Harness(small(write_policy=WritePolicy.WRITE_THROUGH), fails="kv-swap_out")
    recorder = harness.submit("a", range(9), 6)
    harness.run()
    assert recorder.tokens == expected_outputs(range(9), 6)
    assert harness.core.counters.copies[0].swap_out.failures > 0
    assert harness.manager.stats().host_cached_blocks == 0
