"""A host tier that is short holds little twice: what has come back to the device gives up its host copy first."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies import tables
from fastdeploy_kvcache_v1.scheduler.policies.tables import SHORT_HOST
from fastdeploy_kvcache_v1.scheduler.reuse import judge

from .scenario import block, cached, fail, manager, on_host, run, start

SAVING = ["write_back", "auto"]


def hit_rate_in_turns(cache: CacheManager) -> float:
    """Of the last of several rounds in which 58 prompts of two blocks come in turns."""
    for number in range(6 * 58):
        if number == 5 * 58:
            before = cache.stats().counters
        run(cache, f"{chr(0x100 + number % 58)}.!")
    after = cache.stats().counters
    num_hits = after.device_hit_tokens + after.host_hit_tokens - before.device_hit_tokens - before.host_hit_tokens
    return num_hits / (2 * 58)


@pytest.mark.parametrize("policy", SAVING)
@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_both_tiers_together_hold_what_one_of_their_size_would(
    policy: str, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 and 64 blocks for 116."""
    assert hit_rate_in_turns(manager(64, 64, policy, eviction_policy=eviction)) == 1.0
    assert hit_rate_in_turns(manager(128, 0)) == 1.0
    monkeypatch.setattr(tables, "SHORT_HOST", 0)
    monkeypatch.setattr(judge, "SHORTEST", 1 << 30)  # recency rules: of turns, what is learned drops the same blocks
    assert hit_rate_in_turns(manager(64, 64, policy, eviction_policy=eviction)) < 0.7


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_where_nothing_is_saved_at_eviction_no_copy_is_given_up(policy: str) -> None:
    cache = manager(4, 4, policy, write_through_threshold=1)
    for text in ("a!", "a!", "b!", "b!", "c!", "c!", "d!", "d!"):
        run(cache, text)
    assert [on_host(cache, name) for name in "abcd"] == [[True]] * 4
    run(cache, "e!")
    run(cache, "e!")
    assert cached(cache, "a") == [], "the oldest has gone"
    assert [on_host(cache, name) for name in "bcde"] == [[True]] * 4


def two_on_the_host(host: int) -> CacheManager:
    """`a` and `b` are on the host, `c` and `d` on the device, which is full."""
    cache = manager(2, host)
    for text in ("a!", "b!", "c!", "d!"):
        run(cache, text)
    cache.take_swap_step()
    assert [cached(cache, name) for name in "abcd"] == [["host"], ["host"], ["device"], ["device"]]
    return cache


def test_what_has_come_back_goes_first_although_it_was_used_last() -> None:
    cache = two_on_the_host(3)
    run(cache, "b!")  # back, and `c` has left the device for the last place on the host
    assert on_host(cache, "b") == [True], "there was room"
    run(cache, "e!")
    assert (cached(cache, "b"), on_host(cache, "b")) == (["device"], [False])
    assert [cached(cache, name) for name in "acd"] == [["host"]] * 3, "`d` has its place"


def test_it_goes_while_its_request_still_runs() -> None:
    cache = two_on_the_host(2)
    cache.resize_device_pool(3)
    start(cache, "b1!")
    assert cache.take_swap_step().swap_in
    assert cached(cache, "a") == [], "for `c`: the copy of `b` was not told of yet"
    run(cache, "e!")  # `d` leaves the device
    assert [cached(cache, name) for name in "cd"] == [["host"], ["host"]], "older than `b`, and nowhere else"
    cache.commit("b1!", 2)
    cache.finish("b1!")
    cache.check()
    assert on_host(cache, "b1") == [False, False]


def test_when_it_leaves_the_device_it_is_copied_again_and_is_the_youngest_there() -> None:
    cache = two_on_the_host(3)
    run(cache, "b!")
    run(cache, "e!")  # takes the place of the copy of `b`
    run(cache, "f!")  # `b` leaves the device, and the oldest, `a`, the host
    cache.take_swap_step()
    assert cached(cache, "b") == ["host"]
    assert cached(cache, "a") == []
    cache.check()


def test_one_that_was_not_given_up_is_the_youngest_copy_when_its_run_leaves_the_device() -> None:
    cache = two_on_the_host(4)
    cache.resize_device_pool(3)
    for text in ("a!", "1!", "2!", "3!"):
        run(cache, text)
    assert [cached(cache, name) for name in "abcd"] == [["host"]] * 4
    for number, lost in enumerate("bcd", 4):
        run(cache, f"{number}!")
        cache.take_swap_step()
        assert cached(cache, lost) == []
    assert cached(cache, "a") == ["host"]


def test_a_larger_host_tier_keeps_its_copies() -> None:
    cache = two_on_the_host(2 * SHORT_HOST + 1)
    for text in ("b!", "e!", "b!", "f!", "b!", "g!", "b!", "h!"):
        run(cache, text)
    assert on_host(cache, "b") == [True]
    assert cached(cache, "a") == [], "the oldest is lost instead"


def test_a_copy_that_a_store_reads_stays() -> None:
    cache = manager(3, 3)
    for text in ("a!", "b!", "c!"):
        run(cache, text)
    step = run(cache, "d!")
    assert cache.begin_store("reads", step.step, set(step.evict.target_slots)).slots
    run(cache, "a!")  # back, and read
    run(cache, "e!")
    run(cache, "f!")
    assert on_host(cache, "a") == [True]
    assert cached(cache, "b") == [], "the next one"
    cache.end_store("reads")
    run(cache, "a!")
    run(cache, "g!")
    assert (cached(cache, "a"), on_host(cache, "a")) == (["device"], [False])


def test_a_block_is_weighed_against_what_would_be_lost_not_against_a_double(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = manager(3, 3, "auto")
    for text in ("a!", "b!", "c!", "d!", "a!"):
        run(cache, text)
    order = cache._residency.host_order
    double = next(order.candidates())
    assert (double.first_hash, double.on_device, cache.stats().host_free_blocks) == (block("a"), True, 0)
    worths = {block("a"): 9.0, block("b"): 1.0, block("d"): 5.0}
    monkeypatch.setattr(order, "worth", lambda run: worths.get(run.first_hash, 2.0))
    leaving = next(each for each in cache._tree.runs() if each.first_hash == block("d"))
    assert not cache._tiering._is_declined(leaving)
    worths[block("d")] = 0.5
    assert cache._tiering._is_declined(leaving)


def test_a_copy_back_that_fails_after_it_was_given_up_is_nowhere() -> None:
    cache = two_on_the_host(2)
    start(cache, "b1!")
    step = cache.take_swap_step()
    cache.resize_device_pool(4)
    run(cache, "e!")
    run(cache, "f!")
    run(cache, "g!")
    assert fail(cache, step, CacheLevel.DEVICE, step.swap_in.target_slots) == ["b1!"]
    cache.finish("b1!")
    cache.check()
    assert cached(cache, "b") == []


def test_both_parts_of_a_double_that_is_cut_are_doubles() -> None:
    cache = manager(6, 12)
    for text in ("abcd!", "123456!", "abcd!"):
        run(cache, text)
    assert on_host(cache, "abcd") == [True] * 4
    order = cache._residency.host_order
    for text in ("ab5!", "a6!"):
        start(cache, text)
        cache.check()
        doubles = [each for each in cache._tree.runs() if each.host is not None and order.is_double(each.host)]
        assert sum(each.length for each in doubles) == 4
        assert set(doubles) <= set(order.candidates())
