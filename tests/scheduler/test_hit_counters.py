"""When a hit counts: once its copies cannot fail any more."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.metadata import CacheLevel, TransferResult
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import manager, prompt, run


def hits(cache: CacheManager) -> tuple[int, int, int, int]:
    counters = cache.stats().counters
    return counters.requests_admitted, counters.device_hit_tokens, counters.host_hit_tokens, counters.query_tokens


@pytest.mark.parametrize("reset", [False, True])
def test_a_hit_whose_swap_in_failed_is_none(reset: bool) -> None:
    """Not even when the block that the copy was to fill cannot be found any more."""
    cache = manager(4, 4)
    run(cache, "abc!")
    run(cache, "1234!")
    before = hits(cache)
    for name in ("r", "shares"):
        cache.match_prefix(name, prompt("abc!"))
        cache.allocate(name, 3)
    step = cache.take_swap_step()
    assert hits(cache) == before, "not known yet"
    if reset:
        cache.reset_cache()
    failed = TransferResult(
        step.step, CacheLevel.HOST, CacheLevel.DEVICE, 3, 0, 0.0, step.swap_in.target_slots, "injected"
    )
    assert cache.transfer_failed(failed) == ["r", "shares"]
    cache.preempt("r")
    cache.take_swap_step()
    cache.preempt("shares")
    cache.check()
    assert hits(cache) == before
    run(cache, "abc!", "again")
    cache.take_swap_step()
    assert hits(cache) == (before[0] + 1, before[1], before[2], before[3] + 4)


@pytest.mark.parametrize("end", ["next step", "finish", "preempt"])
def test_hits_are_counted_once_when_they_are_certain(end: str) -> None:
    cache = manager(4, 4)
    run(cache, "abc!")
    run(cache, "1234!")
    before = hits(cache)
    cache.match_prefix("r", prompt("abc!"))
    cache.allocate("r", 3)
    cache.take_swap_step()
    assert hits(cache) == before
    if end == "next step":
        cache.take_swap_step()
    else:
        getattr(cache, end)("r")
    after = (before[0] + 1, before[1], before[2] + 3, before[3] + 4)
    assert hits(cache) == after
    cache.take_swap_step()
    if end == "next step":
        cache.finish("r")
    assert hits(cache) == after


def test_a_failed_copy_of_others_takes_no_hits_away() -> None:
    cache = manager(6, 12)
    run(cache, "abc!")
    run(cache, "xyz!")
    run(cache, "123456!")
    before = hits(cache)
    for name in ("abc!", "xyz!"):
        cache.match_prefix(name, prompt(name))
        cache.allocate(name, 3)
    step = cache.take_swap_step()
    slots = step.swap_in.target_slots[:3]
    failed = TransferResult(step.step, CacheLevel.HOST, CacheLevel.DEVICE, 3, 0, 0.0, slots, "injected")
    (lost,) = cache.transfer_failed(failed)
    cache.preempt(lost)
    cache.take_swap_step()
    assert hits(cache) == (before[0] + 1, before[1], before[2] + 3, before[3] + 4)


def test_a_failed_backup_takes_no_hits_away_from_device_slots_of_the_same_number() -> None:
    cache = manager(4, 4, "write_through")
    run(cache, "ab!")  # device slots 0 and 1
    before = hits(cache)
    cache.match_prefix("r", prompt("ab!"))
    cache.allocate("r", 2)
    step = cache.take_swap_step()  # backs them up into host slots 0 and 1
    failed = TransferResult(step.step, CacheLevel.DEVICE, CacheLevel.HOST, 2, 0, 0.0, (0, 1), "injected")
    assert set(step.evict.target_slots) == {0, 1} == set(cache.block_table("r"))
    assert cache.transfer_failed(failed) == []
    cache.finish("r")
    assert hits(cache) == (before[0] + 1, before[1] + 2, before[2], before[3] + 3)


def test_a_matched_request_that_waits_owns_nothing() -> None:
    cache = manager(4)
    run(cache, "ab!")
    before = cache.stats()
    cache.match_prefix("waits", prompt("ab!"))
    stats = cache.stats()
    assert (stats.device_cached_blocks, stats.device_free_blocks) == (2, 2)
    assert (stats.device_evictable_blocks, stats.num_requests) == (0, before.num_requests + 1)
    assert cache.num_blocks("waits") == 0
    assert cache.block_table("waits") == []
