"""Which block leaves the host tier first, and what a search for a victim does to blocks whose copy is open."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies import tables

from .scenario import cached, fail, manager, on_host, prompt, run, start


def test_a_hit_makes_the_host_copy_young_too() -> None:
    cache = manager(8, 2, "write_through")
    run(cache, "a!")
    run(cache, "b!")
    run(cache, "a!", "again")
    run(cache, "c!")
    assert (on_host(cache, "a"), on_host(cache, "b")) == ([True], [False])


def passed_over(texts: tuple[str, ...], device: int) -> CacheManager:
    """`texts`, unused, were passed over because their copies are open; `e` had to go for `n` instead of them."""
    cache = manager(device, 1 + sum(map(len, texts)), "write_through")
    run(cache, "e!")
    cache.take_swap_step()
    for text in (*texts, "n"):
        start(cache, text + "!", text)
    cache.take_swap_step()
    for text in texts:
        cache.commit(text, len(text))
        cache.finish(text)
    start(cache, "e!", "hit")
    cache.finish("hit")  # now the youngest
    cache.commit("n", 1)
    cache.finish("n")
    cache.check()
    assert on_host(cache, "e") == [False]
    return cache


def test_copies_that_were_passed_over_are_still_the_oldest() -> None:
    cache = passed_over(("p", "q"), 8)
    cache.take_swap_step()
    cache.check()
    run(cache, "k!")
    assert [on_host(cache, text) for text in "pqnk"] == [[False], [True], [True], [True]]
    run(cache, "m!")
    assert [on_host(cache, text) for text in "qnkm"] == [[False], [True], [True], [True]]


def test_a_copy_that_was_passed_over_may_be_cut_and_used_before_its_step() -> None:
    cache = passed_over(("pq",), 5)
    start(cache, "12!")  # one free block, and `q`, the oldest leaf
    cache.check()
    cache.finish("12!")
    cache.take_swap_step()
    cache.check()
    assert cached(cache, "pq") == ["device", "host"]
    run(cache, "k!")
    assert cached(cache, "pq") == ["device"]  # its host copy was the oldest


def test_a_copy_that_was_passed_over_is_young_after_a_hit() -> None:
    cache = passed_over(("p", "q"), 8)
    start(cache, "p!", "hit")
    cache.finish("hit")
    cache.take_swap_step()
    run(cache, "k!")
    assert [on_host(cache, text) for text in "pqn"] == [[True], [False], [True]]


def test_a_copy_that_was_passed_over_can_be_forgotten() -> None:
    cache = passed_over(("p", "q"), 8)
    cache.reset_cache()
    cache.check()
    cache.take_swap_step()
    cache.check_idle()
    assert cache.stats().host_free_blocks == 3


def test_a_run_whose_copy_is_open_is_not_joined_with_one_whose_copy_is_done() -> None:
    cache = manager(8, 4, "write_through")
    for name in ("first", "second"):
        cache.match_prefix(name, prompt("ab!"))
        cache.allocate(name, 2)
    cache.take_swap_step()
    cache.commit("first", 2)
    cache.finish("first")
    step = cache.take_swap_step()
    start(cache, "a!", "cuts")  # `a` from `b`
    assert fail(cache, step, CacheLevel.HOST, step.evict.target_slots[:1]) == []
    cache.release("cuts")
    assert on_host(cache, "ab") == [False, True]
    cache.commit("second", 2)  # backs `a` up again
    cache.finish("second")
    cache.check()
    assert len(cache.take_swap_step().evict) == 1
    cache.check()
    assert on_host(cache, "ab") == [True, True]


@pytest.mark.parametrize("policy", [policy.value for policy in WritePolicy])
def test_nothing_is_copied_that_has_no_room(policy: str) -> None:
    cache = manager(2, 0, policy)
    for text in ("ab!", "cd!", "cd!", "cd!", "ab!"):
        assert not run(cache, text, text).evict


def root_older_than_leaf() -> CacheManager:
    """`p` is the oldest block on the host; `c`, below it, was in use during a search for room, and came back."""
    cache = manager(2, 4)
    run(cache, "pc!")
    run(cache, "xy!")
    run(cache, "p!", "hit")
    run(cache, "12!")
    cache.take_swap_step()  # on the host, oldest first: `c`, `y`, `p`, `x`
    cache.match_prefix("waits", prompt("pc!"))
    run(cache, "3!")  # passes over `c`; `y` makes room for `2`
    assert cached(cache, "xy") == ["host"]
    cache.release("waits")
    return cache


def test_a_root_waits_for_a_younger_leaf_and_goes_right_after_it() -> None:
    cache = root_older_than_leaf()
    left = []
    for name in "45678":
        run(cache, f"{name}!")
        cache.check()
        left.append([text for text in ("p", "pc", "x", "12") if len(cached(cache, text)) == len(text)])
    # `x` and `2` are older than `c`, and `p` waits for it.
    assert left == [["p", "pc", "12"], ["p", "pc"], ["p"], [], []]


def test_a_root_that_is_on_the_device_gives_up_its_host_copy_before_a_younger_leaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "SHORT_HOST", 0)
    cache = root_older_than_leaf()
    cache.resize_device_pool(5)
    for text in ("p!", "1234!", "p!"):
        run(cache, text)  # on the host in the end, oldest first: `c`, `3`, `2`, `p`
    cache.match_prefix("waits", prompt("pc!"))
    run(cache, "5!")  # passes over `c`
    cache.release("waits")
    for text in ("6!", "7!"):
        assert cached(cache, "pc") == ["device", "host"]
        assert on_host(cache, "pc") == [True, True]
        run(cache, text)
        cache.check()
    assert cached(cache, "pc") == ["device", "host"]
    assert on_host(cache, "pc") == [False, True]


def test_blocks_below_one_that_is_waited_for_go_when_it_is_their_turn() -> None:
    cache = root_older_than_leaf()
    cache.match_prefix("waits", prompt("p!"))
    run(cache, "4!")  # `x` is older than `c`
    cache.release("waits")
    assert cached(cache, "pc") == ["host", "host"]
    assert cached(cache, "x") == []
