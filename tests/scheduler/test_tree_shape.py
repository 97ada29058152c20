"""Which blocks form one run: the fewer there are, the less every operation costs."""

from __future__ import annotations

from fastdeploy_kvcache_v1.cache_manager import CacheManager
from fastdeploy_kvcache_v1.metadata import Allocation

from .scenario import block, manager, prompt, run, start


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
    assert shape(cache) == ["a..ab", "abc..abcdef"]  # `ab` was hit once, the rest never


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


def test_runs_cut_by_a_match_are_joined_when_the_request_that_cut_them_is_rolled_back() -> None:
    cache = manager(8)
    run(cache, "abcd!")
    for text in ("ab!", "abc!", "a!"):
        start(cache, text)
    assert shape(cache) == ["a..a", "ab..ab", "abc..abc", "abcd..abcd"]
    for text in ("abc!", "a!", "ab!"):
        cache.release(text)
    assert shape(cache) == ["a..abcd"]


def test_runs_hit_differently_stay_apart() -> None:
    cache = manager(8)
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
    cache._tree.root.children[block("a")].hits = 0
    cache.match_prefix("again", prompt("ab!"))
    cache.release("again")
    cache.check()
    assert shape(cache) == ["a..a", "ab..ab", "x..x"]


def test_a_request_joins_its_runs_when_nothing_keeps_them_apart_any_more() -> None:
    """Else a long generation below a prefix that was matched for a moment leaves a chain of runs."""
    cache = manager(16)
    cache.match_prefix("r", prompt("abcdefgh!"))
    for tokens in range(1, 9):
        grow(cache, "r", tokens)
        cache.match_prefix("probe", prompt("abcdefgh"[:tokens] + "!"))
        cache.release("probe")
    assert len(cache._tree.path(cache._requests["r"].leaf)) == 1
    cache.finish("r")
    assert shape(cache) == ["a..abcdefgh"]
