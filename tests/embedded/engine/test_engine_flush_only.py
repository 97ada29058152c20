"""The engine tells the index of the attention store what it has; tests/storage/attention_store holds the rest."""

from tests.embedded.engine.storage_server import AttentionStoreServer

PROMPT = list(range(30))


def test_a_request_that_ended_is_announced_from_its_first_block_on_and_nothing_moves():
    server = AttentionStoreServer(flush_only=True)
    assert server.ask("first", PROMPT) == 0
    (task,) = server.store.stated
    assert (task.token_ids, task.start_write_block_idx, task.flush_cache_exists) == (tuple(PROMPT[:28]), 0, True)
    assert server.store.values == {}
    assert server.tier.counters.queries == 0
    assert server.tier.counters.flushes == 1


def test_a_reset_takes_everything_back():
    server = AttentionStoreServer(flush_only=True)
    server.ask("first", PROMPT)
    server.core.reset_cache()
    server.settle()
    last = server.store.stated[-1]
    assert (last.token_ids, last.start_write_block_idx) == (tuple(PROMPT[:28]), 0)
    assert last.flush_cache_exists is False
