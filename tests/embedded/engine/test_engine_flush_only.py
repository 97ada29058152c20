"""The index of the attention store says what the cache has, whenever nothing is under way."""

import pytest

from tests.embedded.engine.storage_server import BLOCK, AttentionStoreServer

PROMPT = list(range(30))
LONG = [60 + token for token in range(60)]


def paths(tokens, num_blocks):
    return {tuple(tokens[: BLOCK * (index + 1)]) for index in range(num_blocks)}


def index_of(flushed):
    """Paths of blocks after all statements, replayed in order."""
    index = set()
    for task in flushed:
        assert task.flush_cache_exists in (True, False), "it is stated, never guessed"
        assert not task.gpu_block_ids
        num_blocks = len(task.token_ids) // BLOCK
        assert 0 <= task.start_write_block_idx < num_blocks
        about = paths(task.token_ids, num_blocks) - paths(task.token_ids, task.start_write_block_idx)
        index = index | about if task.flush_cache_exists else index - about
    return index


def test_a_request_that_ended_is_announced_from_its_first_block_on_and_nothing_moves():
    server = AttentionStoreServer(flush_only=True)
    assert server.ask("first", PROMPT) == 0
    (task,) = server.store.stated
    assert (task.token_ids, task.start_write_block_idx, task.flush_cache_exists) == (tuple(PROMPT[:28]), 0, True)
    assert server.store.values == {}
    assert server.tier.counters.queries == 0
    assert server.tier.counters.flushes == 1


@pytest.mark.parametrize("host", [0, 4])
def test_what_was_evicted_is_gone_from_the_first_lost_block_on(host):
    server = AttentionStoreServer(device=16, host=host, flush_only=True)
    server.ask("first", PROMPT)
    num_before = len(server.store.stated)
    server.ask("second", LONG)
    lost = [task for task in server.store.stated[num_before:] if not task.flush_cache_exists]
    assert lost
    assert all(task.token_ids == tuple(PROMPT[: len(task.token_ids)]) for task in lost)
    hasher = server.harness.generation("probe", PROMPT, 1, None).hasher
    left = server.manager.count_cached(hasher.hashes)
    assert left < 7
    assert min(task.start_write_block_idx for task in lost) == left


def test_a_copy_on_the_host_is_still_a_copy():
    server = AttentionStoreServer(device=16, host=64, flush_only=True)
    server.ask("first", PROMPT)
    server.ask("second", LONG)
    assert server.manager.stats().counters.device_evicted_blocks > 0
    assert all(task.flush_cache_exists for task in server.store.stated)


def test_a_reset_takes_everything_back():
    server = AttentionStoreServer(flush_only=True)
    server.ask("first", PROMPT)
    server.core.reset_cache()
    server.settle()
    last = server.store.stated[-1]
    assert (last.token_ids, last.start_write_block_idx) == (tuple(PROMPT[:28]), 0)
    assert last.flush_cache_exists is False
    assert index_of(server.store.stated) == set()


def test_blocks_that_token_ids_do_not_name_are_not_announced():
    server = AttentionStoreServer(flush_only=True)
    server.ask("tenant", PROMPT, salt=b"tenant")
    assert server.store.stated == []
    assert server.tier.counters.unaddressable_blocks == 7


def test_statements_are_made_again_in_order_until_the_store_takes_them():
    server = AttentionStoreServer(flush_only=True)
    server.store.failure_rate = 1.0
    server.harness.submit("first", PROMPT, 1)
    server.send()
    server.work()
    for _ in range(3):
        server.send()
        assert len(server.store.statements) == 1
        server.answer()
    server.send()
    assert not server.store.statements, "the store is left alone"
    assert server.tier.is_left_alone
    assert server.tier.counters.flush_failures == 3
    server.store.failure_rate = 0.0
    server.core.reset_cache()
    server.clock.now += server.core.seconds_to_next_deadline() + 0.001
    server.settle()
    assert [task.flush_cache_exists for task in server.store.stated] == [True, False]
    assert not server.tier.is_left_alone


def test_statements_that_a_broken_store_does_not_take_are_bounded_and_counted(monkeypatch):
    monkeypatch.setattr("fastdeploy_kvcache_v1.storage.attention_store.flushes.MOST_WAITING", 3)
    server = AttentionStoreServer(flush_only=True)
    for number in range(6):  # the first one is never answered
        server.harness.submit(f"r{number}", [number, *PROMPT[:12]], 1)
        server.send()
        server.work()
    server.send()
    assert server.tier._stores.num_waiting == 4
    assert server.tier.counters.dropped_flushes == 2
