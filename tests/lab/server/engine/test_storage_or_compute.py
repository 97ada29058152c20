"""A request waits for its stored prefix as long as that is sooner than computing it, by what was measured."""

import pytest

from fastdeploy_kvcache_v1.contract.messages import PrefillTime
from tests.lab.server.engine.storage_server import HostTierServer
from tests.lab.server.engine.test_engine_storage import PROMPT, stored_by_a_first_server
from tests.lab.server.harness import expected_outputs


def server_with(load_s, compute_s=1.0, **options):
    """It has measured, unless they are None, what a block takes to load, and a token to compute."""
    server = HostTierServer(stored=stored_by_a_first_server(), **options)
    costs = server.tier._fetches.costs
    if load_s is not None:
        server.store.seconds_per_block = load_s
        costs.loaded(32, 32 * load_s)
    if compute_s is not None:
        server.harness.core.prefill_costs.computed(PrefillTime(100, 0.0, 100 * compute_s))
    return server


@pytest.mark.parametrize(("load_s", "cached"), [(0.1, 28), (3.5, 28), (4.5, 0), (100.0, 0)])
def test_a_request_waits_only_for_what_is_sooner_loaded_than_computed(load_s, cached):
    """Seven blocks; 28 s to compute."""
    server = server_with(load_s)
    assert server.ask("r", PROMPT) == cached
    assert server.tier.counters.declined_requests == (not cached)
    assert server.tier.counters.late_requests == 0
    assert server.ask("again", PROMPT) == 28, "computed or not, it is cached now"


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
