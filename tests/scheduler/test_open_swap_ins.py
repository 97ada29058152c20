"""A swap-in that the worker has not been told of yet: which requests share it, and what if none waits for it."""

from __future__ import annotations

from fastdeploy_kvcache_v1.metadata import Allocation
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import cached, manager, prompt, run


def test_a_request_that_shares_a_planned_swap_in_needs_no_slots_for_it() -> None:
    cache = manager(4, 4)
    run(cache, "abc!")
    run(cache, "1234!")
    for name, host in (("plans", 3), ("shares", 0)):
        match = cache.match_prefix(name, prompt("abc!"))
        allocation = cache.allocate(name, 3)
        assert isinstance(allocation, Allocation)
        assert (match.num_host_blocks, match.num_device_blocks) == (host, 3 - host)
        assert (allocation.num_host_tokens, allocation.num_device_tokens) == (host, 3 - host)
    assert len(cache.take_swap_step().swap_in) == 3


def block_below_an_open_swap_in() -> CacheManager:
    """`a` is on the host, `waits` has planned its swap-in; `ab`, which another request computed, hangs below it."""
    cache = manager(8, 8)
    for name, text in (("first", "a!"), ("second", "ab!")):
        cache.match_prefix(name, prompt(text))
        cache.allocate(name, len(text) - 1)
    cache.take_swap_step()
    cache.commit("first", 1)
    cache.finish("first")
    run(cache, "123456!")  # evicts `a`
    assert cached(cache, "a") == ["host"]
    cache.match_prefix("waits", prompt("a!"))
    cache.allocate("waits", 1)
    cache.commit("second", 2)
    cache.finish("second")
    cache.check()
    return cache


def test_a_swap_in_above_a_device_block_goes_on_when_no_request_waits_for_it() -> None:
    cache = block_below_an_open_swap_in()
    cache.release("waits")
    cache.check()
    assert cached(cache, "ab") == ["swap_to_device", "device"]
    assert len(cache.take_swap_step().swap_in) == 1
    assert cached(cache, "ab") == ["device"] * 2
    cache.check_idle()


def test_a_swap_in_that_no_request_waits_for_is_evicted_by_cancelling_it() -> None:
    cache = block_below_an_open_swap_in()
    cache.release("waits")
    cache.match_prefix("huge", prompt("qwertyui!"))
    assert isinstance(cache.allocate("huge", 8), Allocation)
    cache.check()
    step = cache.take_swap_step()
    assert not step.swap_in
    assert cached(cache, "ab") == ["host"] * 2
    assert len(step.evict) == 6 + 1  # `1` to `6` and `b`; `a` never left the host
    cache.finish("huge")
    cache.check_idle()


def test_a_reset_cancels_a_swap_in_that_no_request_waits_for() -> None:
    cache = block_below_an_open_swap_in()
    cache.release("waits")
    cache.reset_cache()
    cache.check()
    assert not cache.take_swap_step().swap_in
    cache.check_idle()
    assert cache.num_free_device_blocks == 8


def test_a_match_may_wait_for_a_swap_in_that_others_gave_up() -> None:
    cache = block_below_an_open_swap_in()
    cache.release("waits")
    match = cache.match_prefix("r", prompt("ab!"))
    assert (match.num_device_blocks, match.num_host_blocks) == (2, 0)
    assert isinstance(cache.allocate("r", 2), Allocation)
    step = cache.take_swap_step()
    assert list(step.swap_in.target_slots) == cache.block_table("r")[:1]
    cache.finish("r")
    cache.check_idle()
