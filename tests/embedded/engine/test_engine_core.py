"""The engine core against a worker whose KV can be read: the tokens prove copies, tables and commits."""

import random

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.embedded.engine.engine_core import MAX_COPY_FAILURES
from fastdeploy_kvcache_v1.embedded.engine.generation import Failure
from fastdeploy_kvcache_v1.metadata import CacheLevel, TransferResult
from fastdeploy_kvcache_v1.model.step import StepResult, TransferReport
from tests.embedded.shadow import Harness, expected_outputs

POLICIES = list(WritePolicy)


def small(num_device_blocks=8, num_host_blocks=16, **options):
    return KVCacheConfig(num_device_blocks, num_host_blocks, block_size=4, **options)


def random_requests(seed, count):
    """Prompts that share prefixes, some continuing others; every one fits eight blocks of four tokens."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(100) for _ in range(rng.randrange(4, 13))] for _ in range(5)]
    requests = []
    for index in range(count):
        prompt = rng.choice(prefixes) + [rng.randrange(100) for _ in range(rng.randrange(1, 6))]
        output = rng.randrange(1, 9)
        requests.append((f"r{index}", prompt, output))
        if rng.random() < 0.3 and len(prompt) + output < 20:
            prefixes.append(prompt + expected_outputs(prompt, output))
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_load_with_a_far_too_small_device_tier(policy, seed):
    harness = Harness(small(write_policy=policy), max_num_seqs=6, max_num_batched_tokens=16)
    rng = random.Random(seed)
    recorders = {}
    pending = random_requests(seed, 80)
    expected = {name: expected_outputs(prompt, output) for name, prompt, output in pending}
    while pending or not harness.core.is_idle:
        for _ in range(rng.randrange(3)):
            if pending:
                name, prompt, output = pending.pop()
                recorders[name] = harness.submit(name, prompt, output)
        harness.step()
    harness.run()
    assert {name: recorder.tokens for name, recorder in recorders.items()} == expected
    counters = harness.core.counters
    assert counters.finished == 80
    assert counters.copies.swap_in.blocks > 0
    assert counters.copies.swap_out.blocks > 0
    assert harness.num_preemptions > 0


def abort_one(harness, rng, names, recorders, gone):
    name = rng.choice(names)
    if not recorders[name].ended:
        gone.add(name)
        harness.core.abort(name)


@pytest.mark.parametrize("seed", range(40))
def test_random_sizes_aborts_resets_and_failures(seed):
    rng = random.Random(seed)
    failure_rate = rng.choice([0, 0.05, 0.3])
    harness = Harness(
        small(
            rng.choice([8, 9, 12, 20]),
            rng.choice([0, 1, 3, 16, 40]),
            write_policy=rng.choice(POLICIES),
            write_through_threshold=rng.choice([1, 2, 3]),
        ),
        max_num_seqs=rng.choice([1, 2, 6, 12]),
        max_num_batched_tokens=rng.choice([1, 3, 16, 64]),
        fails=lambda result: rng.random() < failure_rate,
    )
    pending = random_requests(seed, 40)
    expected = {name: expected_outputs(prompt, output) for name, prompt, output in pending}
    recorders, gone = {}, set()
    while pending or not harness.core.is_idle:
        for _ in range(rng.randrange(4)):
            if pending:
                name, prompt, output = pending.pop()
                recorders[name] = harness.submit(name, prompt, output)
        if recorders and rng.random() < 0.05:
            abort_one(harness, rng, list(recorders), recorders, gone)
        harness.core.step()
        harness.manager.check()
        if harness.sent:
            batch = harness.sent.pop()
            if batch.requests and rng.random() < 0.05:  # while it is computed
                abort_one(harness, rng, [task.request_id for task in batch.requests], recorders, gone)
            if rng.random() < 0.02:
                harness.core.reset_cache()
            harness.core.on_step_result(harness.worker.run(batch))
            harness.manager.check()
    harness.run()
    for name in expected.keys() - gone:
        if failure_rate and recorders[name].failure is not None:
            assert recorders[name].failure.status == 500
        else:
            assert recorders[name].tokens == expected[name]


@pytest.mark.parametrize("caching", [True, False])
def test_device_tier_alone(caching):
    harness = Harness(small(num_host_blocks=0, enable_prefix_caching=caching), max_num_seqs=6)
    requests = random_requests(7, 40)
    recorders = {name: harness.submit(name, prompt, output) for name, prompt, output in requests}
    harness.run()
    for name, prompt, output in requests:
        assert recorders[name].tokens == expected_outputs(prompt, output)
    assert (harness.manager.stats().counters.device_hit_tokens > 0) == caching


@pytest.mark.parametrize("seed", range(3))
def test_random_copy_failures_change_no_token(seed):
    rng = random.Random(seed)
    harness = Harness(
        small(write_policy=WritePolicy.WRITE_THROUGH), max_num_seqs=6, fails=lambda result: rng.random() < 0.2
    )
    requests = random_requests(seed, 60)
    recorders = {name: harness.submit(name, prompt, output) for name, prompt, output in requests}
    harness.run()
    for name, prompt, output in requests:
        recorder = recorders[name]
        if recorder.failure is None:
            assert recorder.tokens == expected_outputs(prompt, output)
        else:
            assert recorder.failure.status == 500
    assert harness.core.counters.copies.swap_in.failures + harness.core.counters.copies.swap_out.failures > 0
    assert harness.core.counters.finished > 50


def test_request_is_given_up_after_too_many_failed_copies():
    harness = Harness(small())
    recorder = harness.submit("a", range(10), 4)
    for attempt in range(MAX_COPY_FAILURES + 1):
        assert not recorder.events, attempt
        harness.core.step()
        batch = harness.sent.pop()
        assert batch.requests[0].start == 0
        harness.core.on_step_result(StepResult(retry={"a": "the copy was torn"}))
    assert recorder.failure is not None
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


def test_second_request_is_served_from_the_cache_and_says_so():
    harness = Harness(small(num_device_blocks=32))
    prompt = list(range(18))
    for name, cached in (("cold", 0), ("warm", 16)):
        recorder = harness.submit(name, prompt, 2)
        harness.run()
        usage = recorder.deltas[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (18, 2, cached)


def test_failed_swap_in_does_not_count_as_cached():
    harness = Harness(
        small(num_device_blocks=8, write_policy=WritePolicy.WRITE_THROUGH),
        fails=lambda result: result.target is CacheLevel.DEVICE,
    )
    prompt = list(range(18))
    for name, first in (("first", 0), ("others", 100), ("more", 200)):  # the others push it off the device
        harness.submit(name, range(first, first + 18), 2)
        harness.run()
    again = harness.submit("again", prompt, 2)
    harness.run()
    assert harness.core.counters.copies.swap_in.failures > 0
    assert again.tokens == expected_outputs(prompt, 2)
    usage = again.deltas[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0, "all of it was computed in the end"
    stats = harness.manager.stats()
    assert (stats.counters.device_hit_tokens, stats.counters.host_hit_tokens) == (0, 0)
    assert (stats.counters.requests_admitted, stats.counters.query_tokens) == (4, 4 * 18)


def test_what_a_request_computed_itself_before_a_failed_copy_is_not_cached_for_it():
    harness = Harness(small(num_device_blocks=32), max_num_batched_tokens=8)
    recorder = harness.submit("a", range(18), 2)
    harness.step()
    harness.core.step()
    harness.sent.pop()
    harness.core.on_step_result(StepResult(retry={"a": "the copy was torn"}))
    batch = harness.step()
    assert batch.requests[0].start == 8, "its first chunk was committed and is found again"
    harness.run()
    usage = recorder.deltas[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0
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
    usage = recorder.deltas[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0
    assert recorder.tokens == expected_outputs(range(18), 3)


def failed_swap_in(batch):
    """The report of a batch's swap-in that did not arrive."""
    (step,) = batch.swap_steps
    copy = step.swap_in
    return TransferReport(
        (
            TransferResult(
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


def test_requests_lose_a_step_to_what_the_worker_says_and_to_what_the_report_says():
    """The worker names who could not be computed; who used blocks of a failed copy, the cache manager knows."""
    harness, batch, again, new = step_with_a_swap_in()
    wrong = dict.fromkeys(("again", "new"), 1)
    harness.core.on_step_result(StepResult(tokens=wrong, retry={"new": "torn"}, report=failed_swap_in(batch)))
    assert harness.num_preemptions == 2
    assert (again.events, new.events) == ([], []), "neither token is taken"
    harness.run()
    assert again.tokens == expected_outputs(range(18), 2)
    assert new.tokens == expected_outputs([7, 8, 9], 2)


def test_generated_tokens_are_found_by_the_next_turn():
    harness = Harness(small(num_device_blocks=32))
    prompt = list(range(10))
    first = harness.submit("turn-1", prompt, 8)
    harness.run()
    second = harness.submit("turn-2", [*prompt, *first.tokens, 77], 1)
    harness.run()
    usage = second.deltas[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 16, "17 tokens were computed: four full blocks"


@pytest.mark.parametrize("when", ["waiting", "running", "in flight"])
def test_abort_gives_everything_back(when):
    harness = Harness(small())
    other = harness.submit("other", range(50, 56), 3)
    recorder = harness.submit("gone", range(10), 8)
    if when == "running":
        harness.step()
    elif when == "in flight":
        harness.core.step()
    num_events = len(recorder.events)
    harness.core.abort("gone")
    harness.core.abort("gone")
    if when == "in flight":
        harness.core.on_step_result(harness.worker.run(harness.sent.pop()))
    harness.run()
    assert len(recorder.events) == num_events
    assert other.tokens == expected_outputs(range(50, 56), 3)
    assert harness.core.counters.aborted == 1


def test_backups_of_finished_requests_travel_without_any_request():
    harness = Harness(small(write_policy=WritePolicy.WRITE_THROUGH))
    harness.submit("a", range(9), 1)
    batches = []
    while (batch := harness.step()) is not None:
        batches.append(batch)
    assert [(len(batch.requests), len(batch.swap_steps)) for batch in batches] == [(1, 0), (0, 1)]
    assert harness.core.counters.copies.swap_out.blocks == 2


def test_report_between_steps_is_counted():
    harness = Harness(small())
    harness.core.on_report(TransferReport((), 0.5))
    assert harness.core.counters.copies.exposed_wait_s == 0.5


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
    harness = Harness(
        small(write_policy=WritePolicy.WRITE_THROUGH), fails=lambda result: result.target is CacheLevel.HOST
    )
    recorder = harness.submit("a", range(9), 6)
    harness.run()
    assert recorder.tokens == expected_outputs(range(9), 6)
    assert harness.core.counters.copies.swap_out.failures > 0
    assert harness.manager.stats().host_cached_blocks == 0


def test_stop_string_ends_and_cuts_the_output():
    tokens = expected_outputs(range(5), 12)
    text = bytes(tokens).decode()
    stop = text[4:7]
    cut = text.index(stop)
    harness = Harness(small())
    recorder = harness.submit("a", range(5), 12, stops=[stop])
    harness.run()
    assert recorder.text == text[:cut]
    assert recorder.deltas[-1].finish_reason == "stop"
    assert recorder.tokens == tokens[: cut + 3]


def test_stop_token_ends_the_output_without_its_text():
    tokens = expected_outputs(range(5), 12)
    harness = Harness(small())
    recorder = harness.submit("a", range(5), 12, stop_token_ids=frozenset({tokens[3]}))
    harness.run()
    end = tokens.index(tokens[3]) + 1
    assert recorder.tokens == tokens[:end]
    assert recorder.text == bytes(tokens[: end - 1]).decode()
    assert recorder.deltas[-1].finish_reason == "stop"


def test_min_tokens_overrules_stops():
    tokens = expected_outputs(range(5), 6)
    harness = Harness(small())
    recorder = harness.submit("a", range(5), 6, stop_token_ids=frozenset(tokens), min_tokens=4)
    harness.run()
    assert recorder.tokens == tokens[:4]


def test_closed_core_answers_everything_at_once_and_later():
    harness = Harness(small())
    running, waiting = harness.submit("running", range(5), 6), harness.submit("waiting", range(5), 6)
    harness.core.step()
    result = harness.worker.run(harness.sent.pop())
    harness.core.close(Failure(503, "the worker died"))
    harness.core.close(Failure(503, "another reason"))
    late = harness.submit("late", range(5), 6)
    assert [recorder.failure for recorder in (running, waiting, late)] == [Failure(503, "the worker died")] * 3
    harness.core.on_step_result(result)
    assert harness.step() is None


def test_check_reports_queues_and_idleness():
    harness = Harness(small())
    assert harness.core.check()["idle"] is True
    harness.submit("a", range(5), 6)
    harness.step()
    report = harness.core.check()
    assert (report["idle"], report["running"], report["waiting"]) == (False, 1, 0)
    harness.run()


def test_reset_forgets_the_cache_and_disturbs_nobody():
    harness = Harness(small(num_device_blocks=32))
    recorder = harness.submit("a", range(18), 6)
    harness.step()
    harness.core.reset_cache()
    harness.run()
    assert recorder.tokens == expected_outputs(range(18), 6)
    again = harness.submit("b", range(18), 1)
    harness.run()
    usage = again.deltas[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0
