"""Slots lent to a scheduler that keeps its own block tables."""

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.errors import BlockPoolError, CacheStateError, PoolInUseError, UnknownRequestError
from fastdeploy_kvcache_v1.metadata import NoSpace
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher


@pytest.fixture
def manager():
    return CacheManager(KVCacheConfig(num_device_blocks=6, block_size=2))


def sequence(*tokens):
    hasher = BlockHasher(2)
    hasher.extend(list(tokens))
    return hasher


def admit(manager, request_id, tokens):
    match = manager.match_prefix(request_id, tokens)
    manager.allocate(request_id, match.num_tokens)
    return manager.block_table(request_id)


def cache(manager, request_id, *tokens):
    """Compute all full blocks of `tokens` as a foreign scheduler does, and finish."""
    table = admit(manager, request_id, sequence(*tokens))
    blocks = (len(tokens) - 1) // 2
    manager.adopt(request_id, manager.lend(blocks - len(table)))
    manager.take_swap_step()
    manager.commit(request_id, 2 * blocks)
    manager.check()
    manager.finish(request_id)


def test_lent_slots_belong_to_the_borrower(manager):
    slots = manager.lend(4)
    assert slots == [0, 1, 2, 3]
    assert manager.lend(3) == NoSpace(needed=3, available=2)
    assert manager.lent_slots() == {0, 1, 2, 3}
    assert manager.stats().device_cached_blocks == 0
    manager.check()
    manager.take_back(slots)
    manager.check_idle()


def test_a_refused_loan_lends_nothing(manager):
    assert manager.lend(7) == NoSpace(needed=7, available=6)
    assert manager.lent_slots() == frozenset()
    manager.check_idle()


def test_lending_evicts(manager):
    cache(manager, "a", *range(1, 8))
    assert manager.num_free_device_blocks == 3
    assert len(manager.lend(6)) == 6
    manager.check()


def test_adopted_slots_are_cached_and_given_back_with_the_request(manager):
    cache(manager, "a", *range(1, 8))
    again = sequence(*range(1, 8))
    assert len(admit(manager, "b", again)) == 3
    tail = manager.lend(2)
    manager.adopt("b", tail[:1])
    assert manager.lent_slots() == {tail[1]}
    assert manager.block_table("b")[-1] == tail[0]
    manager.preempt("b")  # never committed: the adopted slot is free, the lent one is not
    assert manager.num_free_device_blocks == 2
    manager.take_back(tail[1:])
    manager.check_idle()


def test_adopted_tokens_of_a_step_that_was_taken_count_while_the_next_one_allocates(manager):
    admit(manager, "a", sequence(*range(1, 10)))
    manager.adopt("a", manager.lend(3))
    manager.take_swap_step()
    manager.allocate("a", 8)
    with pytest.raises(CacheStateError, match="closed its step"):
        manager.commit("a", 7)
    manager.commit("a", 6)
    assert len(manager.nodes("a")) == 3
    manager.finish("a")
    manager.check()


def test_what_another_request_cached_meanwhile_is_kept_as_a_duplicate(manager):
    first, second = sequence(1, 2, 3), sequence(1, 2, 3)
    for request_id, tokens in (("a", first), ("b", second)):
        admit(manager, request_id, tokens)
        manager.adopt(request_id, manager.lend(1))
    manager.take_swap_step()
    for request_id in ("a", "b"):
        manager.commit(request_id, 2)
    manager.check()
    assert manager.stats().counters.duplicate_blocks == 1
    manager.finish("a")
    manager.finish("b")
    manager.check_idle()
    assert manager.num_free_device_blocks == 5


@pytest.mark.parametrize("wrong", [[4], [0, 0], [0, 4]])
def test_only_lent_slots_come_back(manager, wrong):
    manager.lend(2)
    admit(manager, "a", sequence(1, 2, 3))
    for refuse in (lambda: manager.take_back(wrong), lambda: manager.adopt("a", wrong)):
        with pytest.raises(BlockPoolError):
            refuse()
    assert manager.lent_slots() == {0, 1}
    manager.check()


def test_adopting_needs_an_admitted_request(manager):
    slots = manager.lend(1)
    with pytest.raises(UnknownRequestError):
        manager.adopt("a", slots)
    manager.match_prefix("a", sequence(1, 2, 3))
    with pytest.raises(CacheStateError, match="allocate first"):
        manager.adopt("a", slots)


def test_lent_slots_hold_the_pool_open(manager):
    manager.lend(6)
    with pytest.raises(PoolInUseError):
        manager.resize_device_pool(5)
    manager.reset_cache(force=True)
    assert manager.lent_slots() == frozenset()
    manager.resize_device_pool(5)
    manager.check_idle()


def test_a_match_can_be_cut_short(manager):
    cache(manager, "a", *range(1, 8))
    assert manager.match_prefix("b", sequence(*range(1, 8)), max_blocks=2).num_blocks == 2
    manager.check()
    manager.release("b")
    assert manager.match_prefix("b", sequence(*range(1, 8)), max_blocks=9).num_blocks == 3
