"""Engine core and a store that addresses the device tier, which answers late, fails, or goes on after a failure."""

from tests.lab.server.engine.storage_server import AttentionStoreServer
from tests.lab.server.harness import expected_outputs

PROMPT = list(range(30))
OTHER = [60 + token for token in range(32)]


def stored_by_a_first_server(prompt=PROMPT, **options):
    first = AttentionStoreServer(**options)
    assert first.ask("first", prompt) == 0
    return first.store.values


def test_another_server_starts_from_what_was_stored_without_any_host_tier():
    values = stored_by_a_first_server()
    assert sorted(len(path) for _, path in values) == [4, 8, 12, 16, 20, 24, 28]
    second = AttentionStoreServer(stored=values)
    assert second.ask("second", PROMPT) == 28
    assert second.tier.counters.load.blocks == 7
    assert second.manager.stats().counters.loaded_blocks == 7
    assert second.ask("third", [*PROMPT[:16], 99, 98]) == 16
    assert second.manager.stats().counters.loaded_blocks == 7, "what is cached is not loaded again"


def test_blocks_that_token_ids_do_not_name_are_neither_stored_nor_loaded():
    values = stored_by_a_first_server()
    server = AttentionStoreServer(stored=values)
    before = dict(values)
    assert server.ask("tenant", PROMPT, salt=b"tenant") == 0
    assert server.store.values == before
    assert server.tier.counters.queries == 0
    assert server.tier.counters.unaddressable_blocks == 14, "seven not asked for, seven not stored"


def test_a_load_waits_for_the_pass_that_still_reads_its_slots():
    """A running request is aborted while its pass runs: its slots are free, and the pass reads them."""
    server = AttentionStoreServer(device=8, stored=stored_by_a_first_server(), prefetch="wait_complete")
    server.harness.submit("runs", OTHER[:28], 4)
    server.send()
    server.answer_question()
    server.send()
    assert server.harness.sent
    server.harness.submit("waits", PROMPT[:14], 1)
    server.send()
    server.core.abort("runs")
    server.answer_question()
    assert server.tier._fetches.lent_since() is not None
    assert not server.store.loads, "the pass has not ended"
    server.work()
    server.send()
    assert server.store.loads
    server.settle()


def test_request_that_needs_slots_of_a_store_waits_for_it():
    server = AttentionStoreServer(device=8, prefetch="best_effort")
    server.harness.submit("first", PROMPT[:13], 1)
    server.send()
    server.work()
    server.send()
    assert server.store.stores
    recorder = server.harness.submit("all", OTHER, 1)
    server.send()
    assert not server.harness.sent
    assert recorder.events == []
    assert server.core.seconds_to_next_deadline() is not None
    server.settle()
    assert recorder.tokens == expected_outputs(OTHER, 1)


def test_request_that_needs_slots_of_a_hanging_store_fails_in_time():
    server = AttentionStoreServer(device=8, prefetch="best_effort")
    server.harness.submit("first", PROMPT[:13], 1)
    server.send()
    server.work()
    server.send()
    recorder = server.harness.submit("all", OTHER, 1)
    server.send()
    assert recorder.events == []
    server.clock.now += server.core.seconds_to_next_deadline() + 60.1
    server.send()
    assert recorder.failure.status == 500
    server.settle()


def test_what_would_follow_a_block_on_the_host_is_not_asked_for():
    server = AttentionStoreServer(device=16, host=64, stored=stored_by_a_first_server([*PROMPT, *OTHER], device=64))
    server.ask("first", PROMPT[:13], 1)
    server.ask("second", [100 + token for token in range(61)], 1)  # "first" is on the host only now
    num_queries = server.tier.counters.queries
    assert server.ask("third", [*PROMPT, *OTHER], 1) == 12
    assert server.tier.counters.queries == num_queries


# ---- where only its index is told what the engine has


def test_ended_request_is_announced_from_its_first_block_without_moves():
    server = AttentionStoreServer(flush_only=True)
    assert server.ask("first", PROMPT) == 0
    (told,) = server.store.stated
    assert (told.path[-1][1], told.first, told.exists) == (tuple(PROMPT[:28]), 0, True)
    assert server.store.values == {}
    assert server.tier.counters.queries == 0
    assert server.tier.counters.flushes == 1


def test_a_reset_takes_everything_back():
    server = AttentionStoreServer(flush_only=True)
    server.ask("first", PROMPT)
    server.core.reset_cache()
    server.settle()
    last = server.store.stated[-1]
    assert (last.path[-1][1], last.first, last.exists) == (tuple(PROMPT[:28]), 0, False)
