"""The engine core against a worker whose KV can be read: the tokens prove copies, tables and commits."""

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.lab.server.engine.generation import Failure
from tests.lab.server.harness import Harness, expected_outputs, random_requests, small


@pytest.mark.parametrize("caching", [True, False])
def test_device_tier_alone(caching):
    harness = Harness(small(num_host_blocks=0, enable_prefix_caching=caching), max_num_seqs=6)
    requests = random_requests(7, 40)
    recorders = {name: harness.submit(name, prompt, output) for name, prompt, output in requests}
    harness.run()
    for name, prompt, output in requests:
        assert recorders[name].tokens == expected_outputs(prompt, output)
    assert (harness.manager.stats().counters.device_hit_tokens > 0) == caching


def test_second_request_is_served_from_the_cache_and_says_so():
    harness = Harness(small(num_device_blocks=32))
    prompt = list(range(18))
    for name, cached in (("cold", 0), ("warm", 16)):
        recorder = harness.submit(name, prompt, 2)
        harness.run()
        usage = recorder.deltas[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (18, 2, cached)


def test_prefix_of_a_waiting_request_stays_cached_although_it_is_oldest():
    """While a request of its own blocks runs, another one waits for its turn; what it will hit is the oldest."""
    harness = Harness(small(num_device_blocks=8, num_host_blocks=0), max_num_seqs=1)
    for name, letter in (("first", 1), ("second", 2)):
        harness.submit(name, [letter] * 13, 1)
        harness.run()
    harness.submit("running", [3] * 13, 1)
    waiting = harness.submit("waiting", [1] * 13, 1)
    harness.run()
    assert harness.manager.stats().counters.device_evicted_blocks > 0
    assert waiting.cached == 12


def test_generated_tokens_are_found_by_the_next_turn():
    harness = Harness(small(num_device_blocks=32))
    prompt = list(range(10))
    first = harness.submit("turn-1", prompt, 8)
    harness.run()
    second = harness.submit("turn-2", [*prompt, *first.tokens, 77], 1)
    harness.run()
    assert second.cached == 16, "17 tokens were computed: four full blocks"


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
    assert harness.core.counters.copies[0].swap_out.blocks == 2


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
    assert again.cached == 0
