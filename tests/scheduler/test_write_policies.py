"""What is copied when, under which policy, with exact slots."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import PoolInUseError
from fastdeploy_kvcache_v1.metadata import Allocation, CacheLevel, CacheStatus, NoSpace
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import cached, fail, manager, on_host, pairs, prompt, run, start


def test_write_back_copies_on_eviction_and_swaps_in_what_is_matched() -> None:
    cache = manager(3, 3)
    run(cache, "abc!")
    step = run(cache, "xyz!")
    assert pairs(step.evict) == [(0, 0), (1, 1), (2, 2)]
    assert cached(cache, "abc") == ["host"] * 3
    cache.match_prefix("again", prompt("abc!"))
    result = cache.allocate("again", 4)
    assert isinstance(result, NoSpace)
    assert (result.needed, result.available) == (4, 3)
    result = cache.allocate("again", 3)
    assert isinstance(result, Allocation)
    assert (result.num_device_tokens, result.num_host_tokens) == (0, 3)
    assert result.new_blocks == []
    step = cache.take_swap_step()
    # x, y, z leave the device although the host is full of pinned sources: they are lost, never overwritten onto those.
    assert not step.evict
    assert pairs(step.swap_in) == list(zip([0, 1, 2], cache.block_table("again"), strict=True))
    assert cache.stats().counters.device_lost_blocks == 3


def test_a_swap_in_source_is_not_handed_to_an_eviction_of_the_same_step() -> None:
    cache = manager(4, 2)
    run(cache, "ab!")
    run(cache, "wxyz!")
    assert cached(cache, "ab") == ["host", "host"]
    cache.match_prefix("back", prompt("ab!"))
    cache.allocate("back", 2)
    cache.match_prefix("new", prompt("12!"))
    cache.allocate("new", 2)
    step = cache.take_swap_step()
    assert set(step.swap_in.source_slots).isdisjoint(step.evict.target_slots)
    cache.check()


def test_an_eviction_reads_the_slots_its_blocks_had_although_they_are_used_again() -> None:
    cache = manager(3, 4)
    run(cache, "abc!")
    cache.take_back(cache.lend(2)[1:])  # cuts `a` off
    assert isinstance(cache.lend(2), list)
    assert sorted(pairs(cache.take_swap_step().evict)) == [(0, 2), (1, 0), (2, 1)]


def test_an_eviction_of_a_block_that_is_computed_again_meanwhile_reads_the_new_slot() -> None:
    """Both hold it; the first slot may have been lent and resized away since."""
    cache = manager(4, 4)
    start(cache, "a!", "r")  # slot 0
    run(cache, "a!", "other")  # slot 1, cached
    lent = cache.lend(3)
    assert lent == [1, 2, 3]
    assert isinstance(lent, list)
    cache.take_back(lent)
    cache.resize_device_pool(4)
    with pytest.raises(PoolInUseError):
        cache.resize_device_pool(1)
    cache.commit("r", 1)
    cache.check()
    cache.resize_device_pool(1)
    assert pairs(cache.take_swap_step().evict) == [(0, 0)]
    cache.finish("r")
    cache.check_idle()


def test_a_block_on_its_way_to_the_host_is_found_only_once_the_worker_knows() -> None:
    cache = manager(2, 2)
    run(cache, "ab!")
    cache.match_prefix("new", prompt("12!"))
    cache.allocate("new", 2)
    assert cached(cache, "ab") == []
    cache.take_swap_step()
    assert cached(cache, "ab") == ["host", "host"]


def test_write_through_copies_complete_blocks_once() -> None:
    cache = manager(4, 8, "write_through")
    assert not run(cache, "ab!").evict
    step = run(cache, "12!")
    assert pairs(step.evict) == [(0, 0), (1, 1)]
    step = run(cache, "ab!")
    assert len(step.evict) == 2  # 1 and 2; a and b have their copies
    step = run(cache, "wxyz!")
    assert not step.evict  # everything evicted was on the host already
    assert cached(cache, "ab") == ["host", "host"]
    assert cached(cache, "12") == ["host", "host"]


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_selective_copies_at_the_threshold(threshold: int) -> None:
    cache = manager(8, 8, "write_through_selective", write_through_threshold=threshold)
    run(cache, "ab!")
    for hits in range(1, 5):
        step = run(cache, "abc!" if hits == 1 else "ab!", f"hit {hits}")
        assert len(step.evict) == (2 if hits == threshold else 0), hits
    run(cache, "12345678!")
    assert cached(cache, "ab") == ["host", "host"]
    assert cached(cache, "abc") == ["host", "host"]  # c was never hit: gone with its eviction


def test_a_backup_without_room_is_counted_once_not_at_every_commit() -> None:
    cache = manager(20, 2, "write_through")
    cache.match_prefix("r", prompt("abcdefghij!"))
    for tokens in range(1, 11):
        cache.allocate("r", tokens)
        cache.take_swap_step()
        cache.commit("r", tokens)
    assert cache.stats().counters.backup_skipped_blocks == 8
    cache.finish("r")


def test_a_run_that_fits_the_host_only_in_part_is_counted_once() -> None:
    cache = manager(4, 1)
    run(cache, "abcd!")
    run(cache, "12!")
    assert cached(cache, "abcd") == ["device", "device", "host"]
    counters = cache.stats().counters
    assert (counters.device_evicted_blocks, counters.device_lost_blocks, counters.backup_skipped_blocks) == (2, 1, 1)


def test_two_requests_share_one_swap_in_and_one_of_them_may_leave() -> None:
    cache = manager(6, 4)
    run(cache, "ab!")
    run(cache, "123456!")
    for name in ("one", "two"):
        cache.match_prefix(name, prompt("ab!"))
        assert isinstance(cache.allocate(name, 3), Allocation)
    assert cache.block_table("one")[:2] == cache.block_table("two")[:2]
    cache.release("one")
    cache.check()
    step = cache.take_swap_step()
    assert list(step.swap_in.target_slots) == cache.block_table("two")[:2]


def test_a_cancelled_swap_in_leaves_no_trace() -> None:
    cache = manager(4, 4)
    run(cache, "ab!")
    run(cache, "1234!")
    cache.take_swap_step()
    before = cache.stats()
    for _ in range(3):
        cache.match_prefix("r", prompt("ab!"))
        nodes = cache.nodes("r")
        assert [node.status for node in nodes] == [CacheStatus.HOST] * 2
        assert isinstance(cache.allocate("r", 2), Allocation)
        assert [node.status for node in cache.nodes("r")] == [CacheStatus.SWAP_TO_DEVICE] * 2
        cache.release("r")
    assert not cache.take_swap_step().swap_in
    after = cache.stats()
    assert after.counters.device_hit_tokens == before.counters.device_hit_tokens
    assert after.counters.host_hit_tokens == before.counters.host_hit_tokens
    assert after.counters.requests_admitted == before.counters.requests_admitted
    assert cached(cache, "ab") == ["host", "host"]


def test_write_back_copies_nothing_that_stays() -> None:
    cache = manager(8, 8, "write_back", write_through_threshold=1)
    for turn in range(4):
        assert not run(cache, "ab!", f"{turn}").evict


def test_copies_are_counted_when_they_are_handed_over() -> None:
    cache = manager(3, 3)
    run(cache, "abc!")
    start(cache, "xyz!")
    assert cache.stats().counters.swap_out_blocks == 0
    cache.take_swap_step()
    cache.finish("xyz!")
    start(cache, "ab!")
    assert cache.stats().counters.swap_in_blocks == 0
    cache.take_swap_step()
    counters = cache.stats().counters
    assert (counters.swap_out_blocks, counters.swap_in_blocks) == (3, 2)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_a_hit_that_wants_a_copy_without_room_is_counted(policy: str) -> None:
    cache = manager(8, 1, policy, write_through_threshold=1)
    run(cache, "ab!")
    before = cache.stats().counters.backup_skipped_blocks
    start(cache, "ab!")
    cache.take_swap_step()
    assert cache.stats().counters.backup_skipped_blocks == before + 1


def test_host_blocks_that_become_unreachable_are_counted_as_evicted() -> None:
    cache = manager(2, 4, "write_through")
    run(cache, "pc!")
    step = cache.take_swap_step()
    cache.match_prefix("cuts", prompt("p!"))
    fail(cache, step, CacheLevel.HOST, step.evict.target_slots[:1])
    cache.release("cuts")
    start(cache, "12!")  # `c` leaves the device, then `p`, which is nowhere else
    assert cached(cache, "pc") == []
    counters = cache.stats().counters
    assert counters.device_evicted_blocks == 2
    assert (counters.device_lost_blocks, counters.host_evicted_blocks) == (1, 1)
    assert cache.stats().host_free_blocks == 4


def test_write_through_into_too_little_room_saves_the_first_blocks_and_tries_the_rest_again() -> None:
    cache = manager(8, 3, "write_through")
    run(cache, "x!")
    cache.take_swap_step()
    cache.match_prefix("holds", prompt("x!"))
    cache.match_prefix("r", prompt("abcd!"))
    for tokens in (3, 4):
        cache.allocate("r", tokens)
        cache.take_swap_step()
        cache.commit("r", tokens)
        if tokens == 3:
            assert cache.stats().counters.backup_skipped_blocks == 1
            cache.release("holds")
    cache.take_swap_step()
    cache.check()
    assert on_host(cache, "abcd") == [True, True, True, False]
    assert cached(cache, "x") == ["device"]
    assert cache.stats().counters.backup_skipped_blocks == 2
    cache.finish("r")


def test_without_a_host_tier_no_backup_is_skipped() -> None:
    for policy in ("write_back", "write_through", "write_through_selective"):
        cache = manager(2, 0, policy, write_through_threshold=1)
        for text in ("ab!", "ab!", "cd!"):
            run(cache, text)
        assert cache.stats().counters.backup_skipped_blocks == 0


# ---- auto: write back, ahead of time


def crowded(policy: str) -> CacheManager:
    """The device is full of prompts that nothing uses, and a step has just pushed two blocks out."""
    cache = manager(16, 64, policy)
    for text in ("ab!", "cd!", "ef!", "gh!", "ij!", "kl!", "mn!", "op!"):
        run(cache, text)
    run(cache, "12!")
    return cache


def test_auto_copies_what_leaves_next_before_it_must() -> None:
    cache = crowded("auto")
    assert cached(cache, "ab") == ["host"] * 2
    assert on_host(cache, "cd") == [True] * 2, "as many as have left"
    assert on_host(cache, "ef") == [False] * 2


def test_an_eviction_copies_nothing_then_and_can_be_undone_in_the_same_step() -> None:
    found = {}
    for policy in ("auto", "write_back"):
        cache = crowded(policy)
        start(cache, "34!")
        found[policy] = cached(cache, "cd")
    assert found == {"auto": ["host"] * 2, "write_back": []}


def test_the_copy_of_an_eviction_that_was_prepared_is_not_made_again() -> None:
    cache = crowded("auto")
    start(cache, "34!")
    step = cache.take_swap_step()
    assert len(step.evict) == 2, "of what leaves next"
    assert on_host(cache, "ef") == [True] * 2
    assert cache.stats().counters.device_lost_blocks == 0


def test_nothing_is_copied_ahead_while_nothing_leaves() -> None:
    cache = manager(8, 16, "auto")
    for text in ("ab!", "cd!", "ef!", "gh!"):
        assert not run(cache, text).evict


def test_nothing_is_copied_ahead_of_slots_that_are_free() -> None:
    cache = crowded("auto")
    lent = cache.lend(4)
    assert isinstance(lent, list)
    cache.take_back(lent)
    assert len(cache.take_swap_step().evict) == 2, "c and d were copied before"


def test_a_rush_is_forgotten() -> None:
    cache = crowded("auto")
    for _ in range(8):
        cache.take_swap_step()
    assert not run(cache, "cd!", "used").evict, "e and f are the next to leave, but nothing has left for long"


@pytest.mark.parametrize(("host", "ahead"), [(256, 32 // 8), (64, 64 // 32)])
def test_what_is_copied_ahead_is_bounded_by_a_part_of_each_tier(host: int, ahead: int) -> None:
    cache = manager(32, host, "auto")
    for number in range(32):
        run(cache, f"{number:c}!")
    step = run(cache, "x" * 16 + "!")
    assert len(step.evict) == 16 + ahead


def test_what_is_in_use_is_not_copied_ahead() -> None:
    cache = manager(4, 16, "auto")
    for text in ("b!", "a!", "c!", "d!"):
        run(cache, text)
    start(cache, "a!", "in use")
    run(cache, "1!")
    assert [on_host(cache, text) for text in "acd"] == [[False], [True], [False]]


def test_a_long_run_is_cut_for_what_is_copied_ahead() -> None:
    cache = manager(32, 64, "auto")
    run(cache, "abcdefghijklmnopqrst!")
    run(cache, "123456789012!")
    step = run(cache, "x!")
    assert len(step.evict) == 2
    assert cached(cache, "abcdefghijklmnopqrst") == ["device"] * 19 + ["host"]
    assert on_host(cache, "abcdefghijklmnopqrst") == [False] * 18 + [True] * 2


def test_without_room_on_the_host_nothing_is_copied_ahead() -> None:
    for host in (0, 1):
        cache = manager(2, host, "auto")
        for text in ("a!", "b!", "c!", "d!"):
            run(cache, text)
        cache.check_idle()
