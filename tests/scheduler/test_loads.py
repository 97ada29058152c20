"""Blocks that storage or a peer brings: slots lent at the beginning, cached at the end, nothing in between."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.errors import CacheStateError, InvariantError, PoolInUseError
from fastdeploy_kvcache_v1.metadata import Allocation, BlockHash, CacheLevel, LoadSlots, NoSpace
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import cached, fail, manager, on_host, pairs, prompt, run, start

DEVICE, HOST = CacheLevel.DEVICE, CacheLevel.HOST


def begin(cache: CacheManager, text: str, first: int, level: CacheLevel = HOST, name: str = "load") -> LoadSlots:
    """Blocks `first` and later of `text`."""
    result = cache.begin_load(name, prompt(text).hashes, first, level=level)
    assert isinstance(result, LoadSlots)
    cache.check()
    return result


def end(cache: CacheManager, num_arrived: int, name: str = "load") -> int:
    num_cached = cache.complete_load(name, num_arrived)
    cache.check()
    return num_cached


def evict_all(cache: CacheManager) -> None:
    """Every cached block leaves the device."""
    slots = cache.lend(cache.num_available_device_blocks)
    assert isinstance(slots, list)
    cache.take_back(slots)
    cache.take_swap_step()
    cache.check()


def idle(cache: CacheManager) -> None:
    cache.take_swap_step()
    cache.check_idle()


# ---- one load


def test_what_was_loaded_is_matched_and_swapped_in_as_ever() -> None:
    cache = manager(4, 4)
    run(cache, "a!")
    slots = begin(cache, "abc", 1).slots
    assert end(cache, 2) == 2
    assert cached(cache, "abc") == ["device", "host", "host"]
    cache.match_prefix("r", prompt("abc!"))
    allocation = cache.allocate("r", 3)
    assert isinstance(allocation, Allocation)
    assert (allocation.num_device_tokens, allocation.num_host_tokens) == (1, 2)
    step = cache.take_swap_step()
    assert pairs(step.swap_in) == list(zip(slots, cache.block_table("r")[1:], strict=True))
    cache.finish("r")
    idle(cache)


def test_a_load_to_the_device_is_there_at_once() -> None:
    cache = manager(4)
    run(cache, "a!")
    slots = begin(cache, "abc", 1, DEVICE).slots
    assert end(cache, 2) == 2
    match = start(cache, "abc!", "r")
    assert match.num_device_blocks == 3
    assert cache.block_table("r")[1:] == list(slots)
    cache.finish("r")
    idle(cache)
    assert cache.stats().device_evictable_blocks == 3


def test_events_tell_of_a_load_when_it_is_complete() -> None:
    cache = manager(4, 4)
    run(cache, "a!")
    cache.take_events()
    begin(cache, "abcd", 1)
    assert cache.take_events() == []
    end(cache, 2)
    assert [tuple(event) for event in cache.take_events()] == [
        ("stored", HOST, (BlockHash(b"ab"), BlockHash(b"abc")), BlockHash(b"a"))
    ]


def test_what_did_not_arrive_goes_back() -> None:
    cache = manager(4, 4)
    begin(cache, "abcd", 0)
    assert cache.stats().host_free_blocks == 0
    assert end(cache, 1) == 1
    assert cached(cache, "abcd") == ["host"]
    assert cache.stats().host_free_blocks == 3
    begin(cache, "abcd", 1)
    assert end(cache, 0) == 0
    counters = cache.stats().counters
    assert (counters.loaded_blocks, counters.wasted_load_blocks) == (1, 0)
    idle(cache)


def test_the_slots_of_a_load_are_counted_and_nowhere_cached() -> None:
    cache = manager(4, 4)
    begin(cache, "ab", 0, name="host")
    begin(cache, "xyz", 0, DEVICE, name="device")
    cache.cancel_load("device")
    stats = cache.stats()
    assert (stats.host_loading_blocks, stats.device_loading_blocks, stats.quarantined_blocks) == (2, 3, 3)
    assert (stats.host_cached_blocks, stats.device_cached_blocks) == (0, 0)
    assert (stats.host_free_blocks, stats.device_free_blocks) == (2, 1)
    assert cached(cache, "ab") == cached(cache, "xyz") == []
    with pytest.raises(InvariantError, match="loads never completed: host, device"):
        cache.check_idle()
    end(cache, 0, "host")
    end(cache, 0, "device")
    idle(cache)


def test_a_load_evicts_what_it_needs() -> None:
    cache = manager(4, 2, "write_through")
    run(cache, "ab!")
    evict_all(cache)
    assert cached(cache, "ab") == ["host", "host"]
    begin(cache, "x", 0)
    assert cached(cache, "ab") == ["host"]
    end(cache, 1)
    assert cached(cache, "x") == ["host"]


def test_a_load_gets_as_many_slots_as_there_is_room_for() -> None:
    for level in (HOST, DEVICE):
        cache = manager(4, 4)
        begin(cache, "xyz", 0, level, name="other")
        assert len(begin(cache, "abc", 0, level).slots) == 1
        before = cache.stats()
        assert cache.begin_load("third", prompt("123").hashes, 1, level=level) == NoSpace(2, 0)
        cache.check()
        assert cache.stats().counters.allocations_refused == before.counters.allocations_refused + 1
        assert cache.stats().host_free_blocks == before.host_free_blocks
        with pytest.raises(CacheStateError, match="2 blocks arrived, it has slots for 1"):
            cache.complete_load("load", 2)
        assert end(cache, 1) == 1
        assert len(cached(cache, "abc")) == 1


def test_nothing_is_loaded_without_prefix_caching() -> None:
    cache = CacheManager(KVCacheConfig(4, 4, block_size=1, enable_prefix_caching=False))
    assert cache.begin_load("load", prompt("abc").hashes, 0) == NoSpace(3, 0)
    cache.check_idle()


# ---- when bytes may come


def test_host_slots_may_be_filled_once_the_worker_has_begun_the_last_step() -> None:
    cache = manager(4, 4)
    assert begin(cache, "a", 0, name="first").after_step == -1
    cache.take_swap_step()
    run(cache, "xyzu!")
    cache.lend(2)  # opens copies to other host slots
    assert begin(cache, "b", 0, name="second").after_step == 1


def test_device_slots_may_be_filled_once_the_worker_has_begun_the_step_that_copies_them_out() -> None:
    cache = manager(2, 4)
    run(cache, "ab!")
    cache.take_swap_step()
    load = begin(cache, "x", 0, DEVICE)
    assert load.after_step == 2
    step = cache.take_swap_step()
    assert step.step == 2
    assert step.evict.source_slots == load.slots
    run(cache, "a!", "again")
    assert begin(cache, "y", 0, DEVICE, name="another").after_step == 4


# ---- what happens meanwhile


def test_no_eviction_and_no_loan_gets_the_slots_of_a_load() -> None:
    cache = manager(4, 4, "write_through")
    host = begin(cache, "ab", 0, name="host").slots
    device = begin(cache, "cd", 0, DEVICE, name="device").slots
    for text in ("12!", "34!", "5!", "67!"):
        step = run(cache, text)
        assert set(step.evict.target_slots).isdisjoint(host)
        lent = cache.lend(2)
        assert isinstance(lent, list)
        assert set(lent).isdisjoint(device)
        cache.take_back(lent)
    assert isinstance(cache.lend(3), NoSpace)
    assert end(cache, 2, "host") == 2
    assert end(cache, 2, "device") == 2
    assert (cached(cache, "ab"), cached(cache, "cd")) == (["host"] * 2, ["device"] * 2)
    idle(cache)


def test_what_comes_below_an_evicted_prefix_is_not_cached() -> None:
    cache = manager(4, 4)
    run(cache, "ab!")
    begin(cache, "abcd", 2)
    evict_all(cache)
    cache.reset_cache()
    run(cache, "a!", "again")
    begin(cache, "abcd", 2, name="second")
    assert end(cache, 2) == 0
    assert end(cache, 2, "second") == 0
    assert cached(cache, "abcd") == ["device"]
    assert cache.stats().counters.wasted_load_blocks == 4
    idle(cache)


def test_a_prefix_that_only_a_preempted_request_kept_may_go_before_the_load_ends() -> None:
    cache = manager(2)
    run(cache, "a!")
    start(cache, "a!", "r")
    begin(cache, "ab", 1, DEVICE)
    assert isinstance(cache.lend(1), NoSpace)
    cache.preempt("r")
    assert cache.lend(1) == [0]
    assert end(cache, 1) == 0
    cache.take_back([0])  # type: ignore[list-item]
    idle(cache)


def test_blocks_that_a_request_cached_meanwhile_are_not_cached_twice() -> None:
    cache = manager(6, 6)
    slots = begin(cache, "abcd", 0).slots
    run(cache, "ab!")
    before = cache.stats().host_free_blocks
    assert end(cache, 4) == 2
    assert cached(cache, "abcd") == ["device", "device", "host", "host"]
    assert cache.stats().host_free_blocks == before + 2
    start(cache, "abcd!", "r")
    assert cache.take_swap_step().swap_in.source_slots == slots[2:]
    assert cache.stats().counters.wasted_load_blocks == 2
    cache.finish("r")
    idle(cache)


@pytest.mark.parametrize("level", [HOST, DEVICE])
def test_of_two_loads_of_the_same_blocks_the_first_one_to_end_counts(level: CacheLevel) -> None:
    cache = manager(6, 6)
    begin(cache, "ab", 0, level)
    begin(cache, "abc", 0, level, name="longer")
    assert end(cache, 2) == 2
    assert end(cache, 3, "longer") == 1
    assert cached(cache, "abc") == [level.value] * 3
    idle(cache)


def test_a_load_may_branch_off_inside_a_run_in_use() -> None:
    cache = manager(6, 6)
    start(cache, "abcd!", "r")
    cache.take_swap_step()
    cache.commit("r", 4)
    begin(cache, "abxy", 2)
    assert end(cache, 2) == 2
    assert cached(cache, "abxy") == ["device", "device", "host", "host"]
    assert cached(cache, "abcd") == ["device"] * 4
    cache.finish("r")
    idle(cache)


def test_what_a_request_computes_that_was_loaded_meanwhile_is_on_both_tiers() -> None:
    cache = manager(6, 6)
    start(cache, "abc!", "r")
    cache.take_swap_step()
    begin(cache, "abc", 0)
    end(cache, 3)
    cache.commit("r", 3)
    cache.check()
    assert cached(cache, "abc") == ["device"] * 3
    assert on_host(cache, "abc") == [True] * 3
    cache.finish("r")
    idle(cache)


def test_a_block_on_its_way_to_the_host_is_not_cached_again() -> None:
    cache = manager(2, 6)
    run(cache, "ab!")
    begin(cache, "abc", 0)
    cache.lend(2)
    assert cached(cache, "ab") == []
    assert end(cache, 3) == 0
    cache.take_swap_step()
    assert cached(cache, "abc") == ["host", "host"]
    cache.check()


def test_device_blocks_are_not_cached_below_a_prefix_that_has_left_the_device() -> None:
    cache = manager(4, 4)
    run(cache, "a!")
    begin(cache, "ab", 1, DEVICE)
    evict_all(cache)
    assert end(cache, 1) == 0
    assert cached(cache, "ab") == ["host"]
    idle(cache)


def test_loaded_blocks_go_with_a_prefix_whose_swap_in_failed() -> None:
    cache = manager(4, 4)
    run(cache, "a!")
    evict_all(cache)
    start(cache, "a!", "r")
    begin(cache, "ab", 1, DEVICE, name="device")
    end(cache, 1, "device")
    step = cache.take_swap_step()
    begin(cache, "abc", 2)
    end(cache, 1)
    assert fail(cache, step, DEVICE, step.swap_in.target_slots) == ["r"]
    cache.preempt("r")
    assert cached(cache, "abc") == []
    idle(cache)
    assert (cache.stats().device_free_blocks, cache.stats().host_free_blocks) == (4, 4)


def test_a_swap_in_above_a_loaded_device_block_goes_on_when_its_request_is_rolled_back() -> None:
    cache = manager(4, 4)
    run(cache, "a!")
    evict_all(cache)
    start(cache, "a!", "r")
    begin(cache, "ab", 1, DEVICE)
    end(cache, 1)
    cache.release("r")
    cache.check()
    assert len(cache.take_swap_step().swap_in) == 1
    assert cached(cache, "ab") == ["device", "device"]
    idle(cache)


@pytest.mark.parametrize("level", [HOST, DEVICE])
@pytest.mark.parametrize("force", [False, True])
def test_what_was_to_be_loaded_before_a_reset_is_not_cached_after_it(level: CacheLevel, force: bool) -> None:
    cache = manager(3, 3)
    slots = begin(cache, "ab", 0, level).slots
    cache.reset_cache(force=force)
    cache.check()
    assert cache.stats().quarantined_blocks == 2
    assert set(begin(cache, "xyz", 0, level, name="other").slots).isdisjoint(slots)
    assert end(cache, 2) == 0
    assert end(cache, 0, "other") == 0
    assert cached(cache, "ab") == []
    idle(cache)


def test_a_cancelled_load_keeps_its_slots_until_no_byte_can_arrive() -> None:
    cache = manager(2, 2, "write_through")
    slots = begin(cache, "a", 0).slots
    cache.cancel_load("load")
    cache.cancel_load("load")
    for text in ("12!", "34!"):
        step = run(cache, text)
        assert not set(slots) & set(step.evict.target_slots)
    cache.take_swap_step()
    assert begin(cache, "abc", 0, name="again") == LoadSlots((1 - slots[0],), 2)
    assert end(cache, 1, "again") == 1
    assert end(cache, 1) == 0
    assert cached(cache, "a") == ["host"]
    idle(cache)


def test_a_load_holds_the_device_pool_open() -> None:
    cache = manager(4)
    begin(cache, "abcd", 0, DEVICE)
    before = cache.stats()
    with pytest.raises(PoolInUseError):
        cache.resize_device_pool(3)
    assert cache.stats() == before
    cache.resize_device_pool(6)
    assert end(cache, 4) == 4
    cache.resize_device_pool(3)
    assert cached(cache, "abcd") == ["device"] * 3
    idle(cache)


# ---- errors


def test_a_load_that_makes_no_sense_is_refused() -> None:
    cache = manager(4, 4)
    begin(cache, "ab", 0)
    for hashes, first, level, name, text in [
        (prompt("x").hashes, 0, HOST, "load", "begun already"),
        (prompt("x").hashes, 1, HOST, "new", "no block 1 among 1 hashes"),
        (prompt("x").hashes, -1, HOST, "new", "no block -1"),
        (prompt("x").hashes, 0, CacheLevel.STORAGE, "new", "not storage"),
    ]:
        with pytest.raises(CacheStateError, match=text):
            cache.begin_load(name, hashes, first, level=level)
    for wrong in (-1, 3):
        with pytest.raises(CacheStateError, match=f"{wrong} blocks arrived, it has slots for 2"):
            cache.complete_load("load", wrong)
    assert end(cache, 2) == 2
    for unknown in (lambda: cache.complete_load("load", 0), lambda: cache.cancel_load("load")):
        with pytest.raises(CacheStateError, match="unknown, or has been completed"):
            unknown()
    idle(cache)
