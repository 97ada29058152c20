"""Host blocks that storage or a peer reads: they stay where they are until that has ended, whatever happens."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.metadata import CacheLevel, StoreSource, SwapStep
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import block, cached, fail, manager, on_host, prompt, run, start

NOTHING = StoreSource((), ())


def backed_up(cache: CacheManager, text: str) -> SwapStep:
    """A whole request under write_through; returns the step that copied its blocks."""
    run(cache, text)
    return cache.take_swap_step()


def begin(cache: CacheManager, step: SwapStep, name: str = "store") -> StoreSource:
    source = cache.begin_store(name, step.step, frozenset(step.evict.target_slots))
    cache.check()
    return source


def fill_host(cache: CacheManager, text: str) -> None:
    """A prompt whose backup takes every host slot that it can get."""
    backed_up(cache, text)
    cache.check()


def test_a_store_names_the_blocks_and_slots_of_its_step() -> None:
    cache = manager(8, 8, "write_through")
    backed_up(cache, "ab!")
    step = backed_up(cache, "abcd!")
    assert begin(cache, step) == StoreSource((block("abc"), block("abcd")), step.evict.target_slots)
    cache.end_store("store")
    cache.check_idle()


def test_blocks_do_not_leave_the_host_while_they_are_stored() -> None:
    cache = manager(8, 2, "write_through")
    step = backed_up(cache, "ab!")
    begin(cache, step)
    fill_host(cache, "xyz!")
    assert on_host(cache, "ab") == [True, True]
    assert on_host(cache, "xyz") == [False, False, False]
    cache.end_store("store")
    fill_host(cache, "uvw!")
    assert on_host(cache, "ab") == [False, False]
    cache.check_idle()


def test_what_left_the_host_before_is_not_stored() -> None:
    cache = manager(8, 2, "write_through")
    step = backed_up(cache, "ab!")
    fill_host(cache, "xy!")
    assert begin(cache, step) == NOTHING
    cache.check_idle()


def test_a_slot_that_another_step_filled_since_is_not_taken_for_the_old_block() -> None:
    cache = manager(8, 1, "write_through")
    old = backed_up(cache, "a!")
    new = backed_up(cache, "b!")
    assert old.evict.target_slots == new.evict.target_slots
    assert begin(cache, old) == NOTHING
    assert begin(cache, new).hashes == (block("b"),)
    cache.end_store("store")


def test_only_the_part_that_the_step_copied_is_stored_of_a_run_that_was_joined() -> None:
    cache = manager(8, 8, "write_through")
    first = backed_up(cache, "ab!")
    backed_up(cache, "abcd!")
    assert begin(cache, first).hashes == (block("a"), block("ab"))
    cache.end_store("store")
    cache.check_idle()


def test_a_copy_of_which_a_part_failed_is_not_stored() -> None:
    cache = manager(8, 8, "write_through")
    step = backed_up(cache, "ab!")
    fail(cache, step, CacheLevel.HOST, step.evict.target_slots[1:])
    assert on_host(cache, "ab") == [False, False], "a run is on the host as a whole or not"
    assert begin(cache, step) == NOTHING
    cache.check_idle()


def test_stores_of_the_same_blocks_end_one_by_one() -> None:
    cache = manager(8, 2, "write_through")
    step = backed_up(cache, "ab!")
    begin(cache, step, "one")
    begin(cache, step, "two")
    with pytest.raises(CacheStateError, match="store one has begun"):
        begin(cache, step, "one")
    cache.end_store("one")
    fill_host(cache, "xy!")
    assert on_host(cache, "ab") == [True, True]
    cache.end_store("two")
    with pytest.raises(CacheStateError, match="store two is unknown"):
        cache.end_store("two")
    cache.check_idle()


@pytest.mark.parametrize("force", [False, True])
def test_a_reset_forgets_the_blocks_and_leaves_the_bytes_of_a_store_alone(force: bool) -> None:
    cache = manager(8, 2, "write_through")
    begin(cache, backed_up(cache, "ab!"))
    cache.reset_cache(force=force)
    cache.check()
    assert cached(cache, "ab") == []
    stats = cache.stats()
    assert stats.device_free_blocks == 8
    assert stats.host_free_blocks == 0
    fill_host(cache, "xy!")
    assert on_host(cache, "xy") == [False, False], "the host slots are still being read"
    cache.reset_cache(force=force)
    cache.end_store("store")
    cache.check_idle()
    assert cache.stats().host_free_blocks == 2


@pytest.mark.parametrize("force", [False, True])
def test_a_reset_drops_a_swap_in_that_nobody_waits_for_of_blocks_that_are_stored(force: bool) -> None:
    """No request uses the blocks any more; one below them is on the device, so their swap-in was not cancelled."""
    cache = manager(12, 16, "write_through")
    step = backed_up(cache, "abc!")
    run(cache, "123456789xyz!")
    cache.take_swap_step()
    assert cached(cache, "abc") == ["host"] * 3
    cache.match_prefix("computes", prompt("abcd!"), max_blocks=0)
    cache.allocate("computes", 4)
    cache.take_swap_step()
    begin(cache, step)
    start(cache, "abc!", "plans")
    cache.commit("computes", 4)
    cache.release("plans")
    cache.finish("computes")
    assert cached(cache, "abc") == ["swap_to_device"] * 3
    cache.reset_cache(force=force)
    cache.check()
    assert not cache.take_swap_step().swap_in
    assert cache.stats().device_free_blocks == 12
    cache.end_store("store")
    cache.check_idle()
    assert cache.stats().host_free_blocks == 16


def test_a_request_goes_on_below_blocks_that_are_stored() -> None:
    cache = manager(8, 8, "write_through")
    begin(cache, backed_up(cache, "ab!"))
    backed_up(cache, "abcd!")
    assert cached(cache, "abcd") == ["device"] * 4
    cache.end_store("store")
    cache.check_idle()


def test_a_store_of_a_step_of_long_ago_finds_nothing() -> None:
    cache = manager(8, 8, "write_through")
    step = backed_up(cache, "ab!")
    for number in range(300):
        backed_up(cache, f"{chr(1000 + number)}!")
    assert begin(cache, step) == NOTHING


def test_looking_for_cached_blocks_changes_nothing() -> None:
    cache = manager(8, 8, "write_through")
    backed_up(cache, "abc!")
    before = cache.stats()
    assert [cache.count_cached(prompt(text).hashes) for text in ("", "a", "abc", "abcd", "b")] == [0, 1, 3, 3, 0]
    assert cache.stats() == before
    cache.check_idle()


def test_a_store_keeps_no_block_on_the_device() -> None:
    cache = manager(4, 8, "write_through")
    begin(cache, backed_up(cache, "abcd!"))
    assert cache.num_available_device_blocks == 4
    backed_up(cache, "wxyz!")
    assert cached(cache, "abcd") == ["host"] * 4
    cache.end_store("store")
    cache.check_idle()


def test_a_failed_copy_beside_blocks_that_are_stored_frees_no_slot_of_theirs() -> None:
    cache = manager(8, 4, "write_through")
    first = backed_up(cache, "ab!")
    second = backed_up(cache, "abcd!")
    run(cache, "abcd!", "again")  # its end joins the blocks of both into one run
    assert begin(cache, first).hashes == (block("a"), block("ab"))
    fail(cache, second, CacheLevel.HOST, second.evict.target_slots)
    cache.check()
    backed_up(cache, "wxyz!")
    assert on_host(cache, "wxyz").count(True) <= 2
    cache.end_store("store")
    cache.check_idle()


def test_a_store_of_a_part_of_a_run_lets_the_rest_leave_the_host() -> None:
    cache = manager(8, 6, "write_through")
    step = backed_up(cache, "abcdef!")
    source = cache.begin_store("store", step.step, frozenset(step.evict.target_slots[2:4]))
    cache.check()
    assert source == StoreSource((block("abc"), block("abcd")), step.evict.target_slots[2:4])
    fill_host(cache, "uvwxyz!")
    assert on_host(cache, "uvwxyz").count(True) == 4
    cache.end_store("store")
    cache.check_idle()
