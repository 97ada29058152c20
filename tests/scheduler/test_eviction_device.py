"""Who leaves the device tier first, and how many: exact blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fastdeploy_kvcache_v1.metadata import Allocation

from .scenario import cached, manager, prompt, run, start


def test_leaves_go_first_and_the_least_recently_used_request_before_others() -> None:
    cache = manager(6)
    run(cache, "abc!")
    run(cache, "xyz!")
    run(cache, "ab!")  # touches a and b, not c
    run(cache, "1!")
    assert cached(cache, "abc") == ["device", "device"]
    run(cache, "2!")
    assert cached(cache, "xyz") == ["device", "device"]
    run(cache, "345!")
    assert cached(cache, "xyz") == []
    assert cached(cache, "abc") == ["device"]  # b went before a


def test_exactly_as_many_blocks_are_evicted_as_needed() -> None:
    cache = manager(8, 4)
    run(cache, "abcdefg!")
    step = run(cache, "123!")
    assert len(step.evict) == 2
    assert cached(cache, "abcdefg") == ["device"] * 5 + ["host"] * 2
    assert cache.stats().counters.device_evicted_blocks == 2
    # The host tier holds f, g. Three more evictions need three host slots: two free ones, and the oldest leaf's.
    run(cache, "456!")
    assert cached(cache, "abcdefg") == ["device"] * 2 + ["host"] * 4
    assert cache.stats().counters.host_evicted_blocks == 1
    assert cache.stats().host_free_blocks == 0


def lru_reference(order: Sequence[str], kept: int) -> set[str]:
    """Blocks that survive when the leaf-first least recently used ones are evicted down to `kept`."""
    recency: dict[str, tuple[int, int]] = {}
    for time, text in enumerate(order):
        for depth in range(1, len(text) + 1):
            recency[text[:depth]] = (time, -depth)
    return set(sorted(recency, key=lambda block: recency[block])[len(recency) - kept :])


@pytest.mark.parametrize(
    "order", [["abcd", "abxy", "ab", "q", "abc"], ["a", "ab", "abc", "abcd", "x", "ab"], ["pq", "pr", "ps", "p", "pq"]]
)
def test_eviction_order_against_a_sorted_list(order: list[str]) -> None:
    blocks = {text[:depth] for text in order for depth in range(1, len(text) + 1)}
    for kept in range(len(blocks) + 1):
        cache = manager(len(blocks))
        for turn, text in enumerate(order):
            run(cache, text + "!", f"{turn}")
        if evicted := len(blocks) - kept:
            cache.match_prefix("filler", prompt("#" * evicted + "!"))
            assert isinstance(cache.allocate("filler", evicted), Allocation)
        found = {text[:depth] for text in order for depth in range(1, len(cached(cache, text)) + 1)}
        assert found == lru_reference(order, kept), kept


def test_the_first_of_many_children_is_not_preferred_by_eviction() -> None:
    cache = manager(8, 0)
    for text in ("sa!", "sb!", "sc!", "sd!"):
        run(cache, text)
    run(cache, "sa!", "again")
    run(cache, "1234!")
    assert [cached(cache, text) == ["device"] * 2 for text in ("sa", "sb", "sc", "sd")] == [True, False, True, True]


def test_a_leaf_goes_before_its_root_even_if_it_came_back_later() -> None:
    cache = manager(3)
    run(cache, "pc!")
    run(cache, "x!")
    run(cache, "p!", "hit")
    cache.match_prefix("waits", prompt("pc!"))
    start(cache, "y!")  # passes over `c`, which waits, and takes the place of `x`
    cache.finish("y!")
    cache.release("waits")
    start(cache, "12!")
    assert cached(cache, "pc") == ["device"]
    cache.check()


def test_blocks_of_one_fate_used_at_different_times_are_evicted_one_by_one() -> None:
    """Two requests computed `a` at the same time; another one ended between them."""
    cache = manager(4)
    for name, text in (("first", "ab!"), ("second", "a?")):
        cache.match_prefix(name, prompt(text))
        cache.allocate(name, len(text) - 1)
    cache.take_swap_step()
    cache.commit("first", 2)
    cache.commit("second", 1)
    cache.finish("first")
    run(cache, "c!")
    cache.finish("second")
    cache.check()
    run(cache, "12!")
    assert (cached(cache, "ab"), cached(cache, "c")) == (["device"], ["device"])
    run(cache, "3!")
    assert (cached(cache, "ab"), cached(cache, "c")) == (["device"], [])


def test_a_root_that_waited_for_a_younger_leaf_leaves_the_device_right_after_it() -> None:
    cache = manager(4)
    for text in ("pc!", "x!", "p!", "y!"):
        run(cache, text)  # oldest first: `c`, `x`, `p`, `y`
    cache.match_prefix("waits", prompt("pc!"))
    run(cache, "1!")  # passes over `c`, takes `x`
    cache.release("waits")  # now `p`, `y`, `1`, `c`
    left = []
    for name in "23456":
        run(cache, f"{name}!")
        cache.check()
        left.append([text for text in ("y", "1", "pc", "p", "2") if len(cached(cache, text)) == len(text)])
    assert left == [["1", "pc", "p", "2"], ["pc", "p", "2"], ["p", "2"], ["2"], []]
