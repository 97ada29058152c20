"""A preempted request finds its own work again: that is no hit, and no reason to back anything up."""

from __future__ import annotations

from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import manager, prompt


def attempt(cache: CacheManager, *, resumed: bool) -> int:
    """Run and preempt; returns how many blocks were copied out meanwhile."""
    cache.match_prefix("r", prompt("abcdef!"), resumed=resumed)
    cache.allocate("r", 6)
    step = cache.take_swap_step()
    cache.commit("r", 6)
    cache.preempt("r")
    return len(step.evict)


def test_its_own_blocks_are_counted_apart_and_not_backed_up() -> None:
    cache = manager(16, 16, "write_through_selective", write_through_threshold=1)
    assert [attempt(cache, resumed=resumed) for resumed in (False, True, True)] == [0, 0, 0]
    counters = cache.stats().counters
    assert (counters.requests_admitted, counters.query_tokens, counters.device_hit_tokens) == (1, 7, 0)
    assert (counters.requests_resumed, counters.resumed_hit_tokens) == (2, 12)
    assert attempt(cache, resumed=False) == 6  # another request's hit
    assert cache.stats().counters.device_hit_tokens == 6


def test_what_it_finds_on_the_host_is_counted_too() -> None:
    cache = manager(6, 6)
    attempt(cache, resumed=False)
    cache.match_prefix("other", prompt("123456!"))
    cache.allocate("other", 6)
    cache.take_swap_step()
    cache.finish("other")
    attempt(cache, resumed=True)
    counters = cache.stats().counters
    assert (counters.resumed_hit_tokens, counters.host_hit_tokens) == (6, 0)


def test_a_hit_that_is_rolled_back_starts_no_backup() -> None:
    cache = manager(16, 16, "write_through_selective", write_through_threshold=1)
    attempt(cache, resumed=False)
    cache.match_prefix("waits", prompt("abcdef!"))
    cache.allocate("waits", 6)
    cache.release("waits")
    assert not cache.take_swap_step().evict
    assert [node.hits for node in nodes(cache)] == [0] * 6


def test_a_hit_of_what_a_reset_made_unfindable_starts_no_backup() -> None:
    cache = manager(16, 16, "write_through_selective", write_through_threshold=1)
    attempt(cache, resumed=False)
    cache.match_prefix("r", prompt("abcdef!"))
    cache.allocate("r", 6)
    cache.reset_cache()
    assert not cache.take_swap_step().evict
    cache.check()
    cache.finish("r")
    cache.take_swap_step()
    cache.check_idle()


def nodes(cache: CacheManager) -> tuple:  # type: ignore[type-arg]
    cache.match_prefix("look", prompt("abcdef!"))
    found = cache.nodes("look")
    cache.release("look")
    return found
