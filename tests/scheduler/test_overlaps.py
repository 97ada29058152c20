"""Events that overlap: late reports, resets and joins around runs that are still in use or on their way."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.metadata import CacheLevel, NoSpace
from fastdeploy_kvcache_v1.scheduler import told_copies
from fastdeploy_kvcache_v1.scheduler.cache_manager import SWEPT_PER_STEP, CacheManager

from .garbage import no_cyclic_garbage
from .scenario import cached, fail, manager, on_host, prompt, run, start


def push_out(cache: CacheManager, free: int) -> None:
    """Evict until `free` device slots are free."""
    slots = cache.lend(free)
    assert not isinstance(slots, NoSpace)
    cache.take_back(slots)


def num_runs(cache: CacheManager) -> int:
    return sum(1 for _ in cache._tree.runs())


def test_runs_in_use_are_not_joined_across_tiers_when_neither_is_queued() -> None:
    cache = manager(3, 8, "write_through")
    run(cache, "ab!")
    cache.take_swap_step()
    push_out(cache, 2)
    run(cache, "c!")
    cache.take_swap_step()
    assert cached(cache, "ab") == ["device", "host"]
    cache.match_prefix("waits", prompt("ab!"))
    push_out(cache, 2)  # passes over `a`, which is in use
    cache.match_prefix("retried", prompt("ab!"))
    cache.release("retried")
    cache.check()
    assert cached(cache, "ab") == ["device", "host"]


def test_nothing_is_appended_to_cells_that_a_forgotten_run_still_uses() -> None:
    cache = manager(5, 1)
    run(cache, "abc!")
    run(cache, "x!")
    push_out(cache, 2)
    late = cache.take_swap_step()  # `c` leaves
    run(cache, "abc!", "again")  # and comes back
    start(cache, "abd!", "r")
    cache.take_swap_step()
    push_out(cache, 1)  # `c` loses its host copy, because `x` leaves
    cache.take_swap_step()
    push_out(cache, 2)  # `c` leaves again, for the same host slot
    fail(cache, late, CacheLevel.HOST, late.evict.target_slots)
    assert cache._residency.detached_runs()
    cache.commit("r", 3)
    cache.check()
    cache.finish("r")
    cache.check()
    assert cached(cache, "abd") == ["device"] * 3
    cache.take_swap_step()
    cache.check_idle()


def test_a_backup_that_failed_is_forgotten_after_its_run_was_joined_with_another() -> None:
    cache = manager(4, 4, "write_through")
    run(cache, "a!")
    late = cache.take_swap_step()
    run(cache, "ab!")
    cache.take_swap_step()
    run(cache, "ab!", "joins")
    assert num_runs(cache) == 1
    assert fail(cache, late, CacheLevel.HOST, late.evict.target_slots) == []
    cache.check()
    assert on_host(cache, "ab")[0] is False


def test_a_swap_in_that_failed_is_forgotten_once_after_its_runs_were_joined() -> None:
    cache = manager(2, 4)
    run(cache, "ab!")
    push_out(cache, 1)
    push_out(cache, 2)
    cache.take_swap_step()
    assert num_runs(cache) == 2
    start(cache, "ab!", "r")
    step = cache.take_swap_step()
    cache.finish("r")
    assert num_runs(cache) == 1
    assert fail(cache, step, CacheLevel.DEVICE, step.swap_in.target_slots) == []
    cache.check_idle()
    assert cached(cache, "ab") == []


@pytest.mark.parametrize(("text", "runs"), [("abc", 1), ("abcd", 2)])
def test_a_run_is_moved_only_to_one_of_at_least_half_its_length(text: str, runs: int) -> None:
    cache = manager(8)
    run(cache, "a!")
    cache.match_prefix("other", prompt("a!"))
    start(cache, f"{text}!", "r")
    cache.take_swap_step()
    cache.commit("r", len(text))  # below `a`, which has two users
    cache.finish("other")
    cache.finish("r")
    cache.check()
    assert num_runs(cache) == runs
    run(cache, f"{text}!", "again")
    assert num_runs(cache) == runs


def test_a_copy_that_failed_names_every_request_that_reads_it_after_a_reset() -> None:
    cache = manager(6, 6)
    run(cache, "ab!")
    push_out(cache, 6)
    cache.take_swap_step()
    start(cache, "a!", "upper")
    start(cache, "ab!", "lower")
    step = cache.take_swap_step()
    cache.reset_cache()
    slot = cache.block_table("upper")[0]
    assert fail(cache, step, CacheLevel.DEVICE, [slot]) == ["upper", "lower"]
    cache.preempt("upper")
    cache.preempt("lower")
    cache.check_idle()


def test_a_copy_that_failed_before_a_reset_concerns_nothing_that_is_cached_after_it() -> None:
    cache = manager(4, 4, "write_through")
    run(cache, "ab!")
    late = cache.take_swap_step()
    cache.reset_cache()
    assert fail(cache, late, CacheLevel.HOST, late.evict.target_slots) == []
    cache.check()
    run(cache, "ab!")
    cache.take_swap_step()
    assert fail(cache, late, CacheLevel.HOST, late.evict.target_slots) == []
    cache.check()
    assert on_host(cache, "ab") == [True, True]
    cache.check_idle()


def test_a_late_report_does_not_touch_a_copy_of_the_same_run_that_is_still_to_be_made() -> None:
    cache = manager(4, 1, "write_through")
    start(cache, "a!", "r")
    run(cache, "a!")
    late = cache.take_swap_step()
    run(cache, "b!")  # its copy goes into the slot that `a` had
    cache.take_swap_step()
    cache.commit("r", 1)  # `a` is copied there again
    assert cached(cache, "a") == ["swap_to_host"]
    assert fail(cache, late, CacheLevel.HOST, late.evict.target_slots) == []
    cache.check()
    assert cached(cache, "a") == ["swap_to_host"]


@pytest.mark.parametrize("age", [0, 1, 2, 3])
def test_a_copy_that_failed_too_long_ago_to_be_remembered_is_found(monkeypatch: pytest.MonkeyPatch, age: int) -> None:
    monkeypatch.setattr(told_copies, "REMEMBERED_STEPS", 2)
    cache = manager(8, 8, "write_through")
    steps = []
    for text in "abcd":
        run(cache, f"{text}!")
        steps.append(cache.take_swap_step())
    late = steps[3 - age]
    assert fail(cache, late, CacheLevel.HOST, late.evict.target_slots) == []
    assert [on_host(cache, text)[0] for text in "abcd"] == [index != 3 - age for index in range(4)]


def test_a_step_takes_apart_a_bounded_part_of_what_a_reset_forgot() -> None:
    cache = manager(SWEPT_PER_STEP + 10)
    for number in range(SWEPT_PER_STEP + 5):
        run_unchecked(cache, chr(1000 + number))
    cache.reset_cache()
    cache.take_swap_step()
    assert cache._tree._ruins
    cache.take_swap_step()
    assert not cache._tree._ruins


def run_unchecked(cache: CacheManager, text: str) -> None:
    start(cache, f"{text}!", "r")
    cache.take_swap_step()
    cache.commit("r", len(text))
    cache.finish("r")


def test_forgotten_runs_below_forgotten_runs_are_no_cyclic_garbage() -> None:
    cache = manager(8)
    with no_cyclic_garbage():
        for text in ("abc", "abd", "ae"):
            run_unchecked(cache, text)
        cache.reset_cache()
        cache.take_swap_step()


def test_what_is_allocated_twice_in_a_step_cannot_be_committed_in_it() -> None:
    cache = manager(4)
    start(cache, "abc!", "r")
    cache.allocate("r", 4)
    with pytest.raises(CacheStateError, match="closed its step"):
        cache.commit("r", 1)


def test_cells_of_runs_that_went_out_of_order_all_go() -> None:
    cache = manager(3, 1)
    run(cache, "abc!")
    for free in (1, 2):  # `c` is on its way to the host when `b` is lost
        push_out(cache, free)
        cache.check()
    cache.take_swap_step()
    cache.check()
    assert cached(cache, "abc") == ["device"]
