"""A request waits for its stored prefix as long as that is sooner than computing it, by what was measured."""

import pytest

from fastdeploy_kvcache_v1.scheduler.link_costs import PROBE_EVERY
from fastdeploy_kvcache_v1.timings import PrefillTime
from tests.embedded.engine.storage_server import BLOCK, HostTierServer
from tests.embedded.engine.test_engine_storage import PROMPT, stored_by_a_first_server
from tests.embedded.shadow import expected_outputs


def server_with(load_s, compute_s=1.0, **options):
    """It has measured, unless they are None, what a block takes to load, and a token to compute."""
    server = HostTierServer(stored=stored_by_a_first_server(), **options)
    costs = server.tier._fetches.costs
    if load_s is not None:
        server.store.seconds_per_block = load_s
        costs.loaded(32, 32 * load_s)
    if compute_s is not None:
        server.harness.scheduler.load_costs.computed(PrefillTime(100, 0.0, 100 * compute_s))
    return server


@pytest.mark.parametrize(("load_s", "cached"), [(0.1, 28), (3.5, 28), (4.5, 0), (100.0, 0)])
def test_a_request_waits_only_for_what_is_sooner_loaded_than_computed(load_s, cached):
    """Seven blocks; 28 s to compute."""
    server = server_with(load_s)
    assert server.ask("r", PROMPT) == cached
    assert server.tier.counters.declined_requests == (not cached)
    assert server.tier.counters.late_requests == 0
    assert server.ask("again", PROMPT) == 28, "computed or not, it is cached now"


def test_a_store_that_was_slow_for_a_while_is_tried_again_and_believed():
    server = server_with(1e6)
    found = []
    for number in range(PROBE_EVERY + 2):
        server.store.seconds_per_block = 0.1 if number >= 5 else 1e6
        found.append(server.ask(f"r{number}", PROMPT))
        server.core.reset_cache()
    assert found == [0] * (PROBE_EVERY - 1) + [28] * 3
    assert server.tier.counters.declined_requests == PROBE_EVERY - 1


def test_of_what_the_store_has_too_little_may_be_worth_it():
    server = server_with(None)
    for count in (1, 32) * 20:
        server.tier._fetches.costs.loaded(count, 20.0 + 0.1 * count)
    server.harness.submit("r", [*PROMPT[:16], *range(100, 131)], 1)
    server.send()
    server.answer_question()
    assert server.tier.counters.found_blocks == 4
    assert server.harness.step() is not None, "20.4 s to load, 16 s to compute"
    assert server.tier.counters.declined_requests == 1
    server.settle()


def test_a_load_that_brought_less_says_nothing():
    server = server_with(None)
    server.store.seconds_per_block = 1e6
    server.harness.submit("loses one", PROMPT, 1)
    server.send()
    server.answer()  # the question
    del server.store.values[list(server.store.values)[-1]]
    server.settle()
    assert server.tier.counters.load.blocks == 6
    server.core.reset_cache()
    assert server.ask("loads", PROMPT) == 28
    assert server.tier.counters.declined_requests == 0


def test_a_store_that_turns_out_slow_is_waited_for_no_longer():
    server = server_with(0.3, 0.1, device=110, host=260)
    long = list(range(4 * 64 + 1))
    server.ask("stores", long)
    server.core.reset_cache()
    recorder = server.harness.submit("waits", long, 1)
    server.send()
    server.answer()  # the question
    assert server.harness.step() is None
    server.store.seconds_per_block = 1e6
    server.answer()  # the first piece
    assert server.store.loads, "the second one is under way"
    assert server.harness.step() is not None
    server.settle()
    assert recorder.cached == 32 * BLOCK
    assert recorder.tokens == expected_outputs(long, 1)
    assert server.tier.counters.declined_requests == 1


@pytest.mark.parametrize(("prefetch", "cached"), [("best_effort", 0), ("wait_complete", 28)])
def test_only_who_waits_for_a_time_weighs_it(prefetch, cached):
    server = server_with(1e6, prefetch=prefetch)
    assert server.ask("r", PROMPT) == cached
    assert server.tier.counters.declined_requests == 0


def test_what_arrives_while_a_declined_request_stands_in_line_is_used():
    server = server_with(1e6, max_num_seqs=1)
    runs = server.harness.submit("runs", [90, 91, 92], 8)
    server.harness.step()
    declined = server.harness.submit("declined", PROMPT, 1)
    server.send()
    while not server.store.is_idle:
        server.answer()
    assert declined.events == []
    server.settle()
    assert declined.cached == 28
    assert runs.tokens == expected_outputs([90, 91, 92], 8)
