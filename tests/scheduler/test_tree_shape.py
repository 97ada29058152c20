"""Which blocks form one run: the fewer there are, the less every operation costs."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.metadata import Allocation
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import block, cached, manager, prompt, run, start


def shape(cache: CacheManager) -> list[str]:
    """Each run by its first and last block, as `first..last`."""
    return sorted(f"{found.hashes[0].decode()}..{found.hashes[-1].decode()}" for found in cache._tree.runs())


def grow(cache: CacheManager, name: str, upto: int) -> None:
    """Allocate, compute and commit up to `upto` tokens, one step per token."""
    for tokens in range(len(cache.nodes(name)) + 1, upto + 1):
        assert isinstance(cache.allocate(name, tokens), Allocation)
        cache.take_swap_step()
        cache.commit(name, tokens)
        cache.check()


def test_what_one_request_computes_step_by_step_is_one_run() -> None:
    cache = manager(8)
    cache.match_prefix("r", prompt("abcdef!"))
    grow(cache, "r", 6)
    assert shape(cache) == ["a..abcdef"]


def test_what_a_request_adds_below_a_prefix_it_found_is_one_run_more() -> None:
    cache = manager(8)
    run(cache, "ab!")
    cache.match_prefix("r", prompt("abcdef!"))
    grow(cache, "r", 6)
    assert shape(cache) == ["a..abcdef"]


def test_hits_that_the_policy_counts_keep_runs_apart_and_more_of_them_do_not() -> None:
    cache = manager(8, 8, "write_through_selective", write_through_threshold=2)
    run(cache, "ab!")
    cache.match_prefix("r", prompt("abcdef!"))
    grow(cache, "r", 6)
    assert shape(cache) == ["a..ab", "abc..abcdef"]  # `ab` was hit once, the rest never
    cache.finish("r")
    for hits in (1, 2, 3):
        run(cache, "abcdef!", f"{hits}")
        assert shape(cache) == (["a..ab", "abc..abcdef"] if hits < 2 else ["a..abcdef"])


def test_two_users_of_a_run_do_not_share_what_one_of_them_adds() -> None:
    cache = manager(8)
    cache.match_prefix("r", prompt("abcd!"))
    grow(cache, "r", 2)
    found = cache.match_prefix("waits", prompt("ab!"))
    grow(cache, "r", 4)
    assert shape(cache) == ["a..ab", "abc..abcd"]
    assert len(cache.nodes("waits")) == found.num_blocks == 2
    cache.release("waits")
    assert shape(cache) == ["a..abcd"]


@pytest.mark.parametrize("host", [0, 8])
def test_runs_cut_by_a_match_are_joined_when_the_request_that_cut_them_is_rolled_back(host: int) -> None:
    cache = manager(8, host, "write_through")
    run(cache, "abcd!")
    cache.take_swap_step()
    for text in ("ab!", "abc!", "a!"):
        start(cache, text)
    assert shape(cache) == ["a..a", "ab..ab", "abc..abc", "abcd..abcd"]
    for text in ("abc!", "a!", "ab!"):
        cache.release(text)
    assert shape(cache) == ["a..abcd"]


def test_runs_hit_differently_stay_apart() -> None:
    cache = manager(8, 8, "write_through_selective")
    run(cache, "abcd!")
    run(cache, "ab!")
    assert shape(cache) == ["a..ab", "abc..abcd"]


def test_a_match_that_ends_where_a_run_ends_cuts_nothing() -> None:
    cache = manager(8)
    run(cache, "ab!")
    cache.match_prefix("r", prompt("abc!"))
    assert shape(cache) == ["a..ab"]


def test_a_fork_keeps_its_stem_apart() -> None:
    cache = manager(8)
    run(cache, "abc!")
    run(cache, "abx!")
    assert shape(cache) == ["a..ab", "abc..abc", "abx..abx"]
    cache.match_prefix("r", prompt("ab!"))
    cache.release("r")
    assert shape(cache) == ["a..ab", "abc..abc", "abx..abx"]


def test_runs_that_are_not_neighbours_in_eviction_order_stay_apart() -> None:
    """Joined they would have one age, which neither of them has."""
    cache = manager(8)
    run(cache, "ab!")
    start(cache, "a!", "cut")
    run(cache, "x!")
    cache.finish("cut")  # `a` is younger than `x`, `b` is older
    top = cache._tree.root.child(block("a"))
    assert top is not None
    top.hits = 0
    cache.match_prefix("again", prompt("ab!"))
    cache.release("again")
    cache.check()
    assert shape(cache) == ["a..a", "ab..ab", "x..x"]


def test_runs_that_are_neighbours_on_the_device_only_stay_apart() -> None:
    cache = manager(3, 3, "write_through")
    run(cache, "ab!")
    cache.match_prefix("cut", prompt("a!"))
    run(cache, "x!")
    cache.finish("cut")  # eviction order `b`, `x`, `a`
    cache.take_swap_step()
    cache.resize_device_pool(2)  # on the device without `x`
    cache.match_prefix("again", prompt("ab!"))
    cache.release("again")
    cache.check()
    assert shape(cache) == ["a..a", "ab..ab", "x..x"]


def test_a_run_on_the_host_is_not_joined_with_one_that_was_swapped_in() -> None:
    cache = manager(2, 4)
    run(cache, "pc!")
    run(cache, "xy!")
    start(cache, "p!", "swaps in")
    cache.take_swap_step()
    cache.match_prefix("waits", prompt("pc!"))
    cache.release("swaps in")
    cache.check()
    assert cached(cache, "pc") == ["device", "host"]
    cache.release("waits")


def test_a_request_joins_its_runs_when_nothing_keeps_them_apart_any_more() -> None:
    """Else a long generation whose prefix others look up leaves a chain of runs."""
    cache = manager(16)
    cache.match_prefix("r", prompt("abcdefgh!"))
    grow(cache, "r", 2)
    for tokens in range(3, 9):
        cache.match_prefix("aborted", prompt("abcdefgh"[: tokens - 2] + "!"))
        cache.finish("aborted")
        grow(cache, "r", tokens)
        assert shape(cache) == [f"a..{'abcdefgh'[:tokens]}"]


def test_a_request_whose_blocks_others_continue_does_not_grow_between_them() -> None:
    """`abx` was computed beside `ab`, not found: no request hit the run that `r` is about to continue."""
    cache = manager(16)
    for name, text in (("r", "aby!"), ("other", "abx!")):
        cache.match_prefix(name, prompt(text))
        cache.allocate(name, 3)
    cache.take_swap_step()
    cache.commit("r", 2)
    cache.commit("other", 3)
    cache.finish("other")
    cache.commit("r", 3)
    cache.check()
    assert shape(cache) == ["a..ab", "abx..abx", "aby..aby"]
    assert cached(cache, "abx") == cached(cache, "aby") == ["device"] * 3


def test_blocks_that_others_cached_first_are_walked_over_run_by_run() -> None:
    cache = manager(16)
    for name in ("first", "second"):
        cache.match_prefix(name, prompt("abcd!"))
        cache.allocate(name, 4)
    cache.take_swap_step()
    cache.commit("first", 4)
    start(cache, "a!")  # cuts `a` from `bcd`
    cache.commit("second", 3)
    assert [node.hash.decode() for node in cache.nodes("second")] == ["a", "ab", "abc"]
    assert shape(cache) == ["a..a", "ab..abc", "abcd..abcd"]
    cache.check()


@pytest.mark.parametrize(
    ("stem", "rest", "is_joined"), [("abc", "def", True), ("ab", "cdef", True), ("a", "bcd", False)]
)
def test_a_long_run_is_not_moved_to_a_short_one_above_it(stem: str, rest: str, is_joined: bool) -> None:
    """Its blocks would be moved again for every run above that comes to share their fate."""
    cache = manager(16)
    text = stem + rest
    cache.match_prefix("r", prompt(text + "!"))
    grow(cache, "r", len(stem))
    cache.match_prefix("waits", prompt(stem + "!"))
    grow(cache, "r", len(text))
    cache.release("waits")
    cache.finish("r")
    cache.check()
    cut = [f"a..{stem}", f"{stem}{rest[0]}..{text}"]
    assert shape(cache) == ([f"a..{text}"] if is_joined else cut)
