"""Where nothing is stored, the store's index says what this server has, whenever nothing is under way."""

import random

import pytest

from fastdeploy_kvcache_v1.contract.messages import CacheEvent, CacheLevel
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.storage.attention_store import flushes
from fastdeploy_kvcache_v1.storage.attention_store.tasks import FlushDone
from fastdeploy_kvcache_v1.storage.attention_store.token_index import Statement, TokenIndex
from fastdeploy_kvcache_v1.storage.engine.target import Prefix
from tests.storage.engines import Engine
from tests.storage.values import block_hash


def server(**options):
    return Engine("device", flush_only=True, **{"events": 1000, **options})


def answer(made, error=None):
    made.tier.answered(FlushDone(made.stores[-1].id, 0, 0, error=error))


def settle(made):
    """All statements are taken; returns the paths of blocks that the index has."""
    made.tier.go_on()
    while made.tier._stores.num_waiting:
        answer(made)
    index = set()
    for path, first, exists in made.statements:
        about = {path[: end + 1] for end in range(first, len(path))}
        assert about, "a statement is about something"
        index = index | about if exists else index - about
    return index


def test_ended_request_is_announced_from_its_first_block_without_moves():
    made = server()
    made.arrive("r", "abcd!")
    made.compute("abc!")
    assert made.link.queries == []
    assert settle(made) == {"a", "ab", "abc"}
    assert made.statements == [("abc", 0, True)]
    assert made.tier.counters.flushes == 1
    made.check_idle()


@pytest.mark.parametrize("backup", [0, 6])
@pytest.mark.parametrize("seed", range(4))
def test_the_index_has_what_the_cache_has_after_any_requests(backup, seed):
    rng, made, computed = random.Random(seed), server(device=16, backup=backup), set()
    for number in range(60):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 12)))
        computed |= {text[: end + 1] for end in range(len(text))}
        made.report(made.compute(text + "!"))
        if rng.random() < 0.1:
            made.manager.reset_cache()
            made.tier.cache_reset()
        if number % 5 == 0:
            index = settle(made)
            assert index == {path for path in computed if made.cached(path) == len(path)}
            assert len(made.tier._stores._index) == len(index)
    lost = [first for _, first, exists in made.statements if not exists]
    assert any(lost), "some paths are gone from a block in their middle on"


def test_blocks_that_token_ids_do_not_name_are_not_announced():
    made = server()
    made.compute("abc!", num_plain_blocks=1)
    assert settle(made) == {"a"}
    assert made.tier.counters.unaddressable_blocks == 2


def test_statements_are_made_again_in_order_until_the_store_takes_them():
    made = server()
    made.compute("abc!")
    for _ in range(3):
        assert made.tier.seconds_to_next_deadline() is None, "it is under way"
        answer(made, "no route")
    assert made.tier.is_left_alone
    assert made.tier.seconds_to_next_deadline() == 1.0
    made.compute("xyz!")
    assert made.statements == [("abc", 0, True)] * 3, "the store is left alone"
    assert made.tier._stores.num_waiting == 2
    made.now = 1.0
    made.tier.go_on()
    assert made.tier._stores.num_waiting == 2, "one of them is under way"
    assert settle(made) == {"a", "ab", "abc", "x", "xy", "xyz"}
    assert [path for path, _, _ in made.statements] == ["abc"] * 4 + ["xyz"]
    assert not made.tier.is_left_alone
    assert (made.tier.counters.flush_failures, made.tier.counters.flushes) == (3, 2)
    assert made.tier.seconds_to_next_deadline() is None


def test_updates_that_a_broken_store_refuses_are_bounded_and_counted(monkeypatch):
    monkeypatch.setattr(flushes, "MOST_WAITING", 3)
    made = server()
    for letter in "abcdef":  # the first one is never answered
        made.compute(f"{letter}!")
    assert made.tier._stores.num_waiting == 4
    assert made.tier.counters.dropped_flushes == 2
    assert made.tier.is_idle, "a statement keeps no slot"


def test_to_follow_the_cache_its_events_are_needed():
    with pytest.raises(ConfigError, match="set max_queued_events above 0"):
        server(events=0)


def test_a_block_is_named_by_all_tokens_up_to_its_end():
    index, (one, two) = TokenIndex(), (block_hash(1), block_hash(2))
    stored = CacheEvent("stored", CacheLevel.DEVICE, (one, two))
    path = Prefix((one, two), (7, 8, 9, 10))
    assert index.update([stored], [path], block_size=2) == [Statement((7, 8, 9, 10), 0, exists=True)]
    removed = CacheEvent("removed", CacheLevel.DEVICE, (two,))
    assert index.update([removed], [path], block_size=2) == [
        Statement((7, 8, 9, 10), 1, exists=False),
        Statement((7, 8), 0, exists=True),
    ]
