"""Copies back to the device: who plans, shares and gives up a swap-in, and when it counts as a hit."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .scenario import Scene, play, play_law, prompt

BELOW = (
    "start a first; start ab second; step; commit first 1; finish first; run 123456; see a H; start a waits;"
    "commit second 2; finish second;"
)
"""`a` is on the host, `waits` has planned its swap-in; `ab`, which another request computed, hangs below it."""

SCENARIOS = {
    "what is matched comes back and its sources are pinned": (
        "3+3: run abc; run xyz; out 0>0 1>1 2>2; see abc HHH; match abc r; full r 4 4 3; grow r 3; step; out 0;"
        "into 0>0 1>1 2>2; table r 0 1 2; count device_lost_blocks 3"
    ),
    "a swap in source is not handed to an eviction of the same step": (
        "4+2: run ab; run wxyz; see ab HH; start ab back; start 12 new; step; into 0>2 1>3; out 0"
    ),
    "two requests share one swap in and one of them may leave": (
        "6+4: run ab; run 123456; start ab one; start ab two; release one; step; into 0>4 1>5; table two 4 5"
    ),
    "a request that shares a planned swap in needs no slots for it": (
        "4+4: run abc; run 1234; start abc plans 0+3; start abc shares 3+0; step; into 3"
    ),
    "a swap in above a device block goes on when no request waits for it": (
        f"8+8: {BELOW} release waits; see ab iD; step; into 1; see ab DD; idle"
    ),
    "a swap in that no request waits for is evicted by cancelling it": (
        f"8+8: {BELOW} release waits; start qwertyui; step; into 0; out 7; see ab HH; finish qwertyui; idle"
    ),
    "a reset cancels a swap in that no request waits for": (
        f"8+8: {BELOW} release waits; reset; step; into 0; idle; count device_free_blocks 8"
    ),
    "a match may wait for a swap in that others gave up": (
        f"8+8: {BELOW} release waits; start ab r 2+0; step; into 0>7; table r 7 2; finish r; idle"
    ),
    "copies are counted when they are handed over": (
        "3+3: run abc; start xyz; count swap_out_blocks 0; step; count swap_out_blocks 3; finish xyz; start ab;"
        "count swap_in_blocks 0; step; count swap_in_blocks 2"
    ),
    "a cancelled swap in leaves no trace": (
        f"4+4: run ab; run 1234; step; hits 2 0 0 8; {'match ab r; uses r HH; grow r 2; uses r ii; release r;' * 3}"
        "step; into 0; hits 2 0 0 8; see ab HH"
    ),
    # ---- hits count when their step is taken
    "a hit whose swap in failed is one all the same": (
        "4+4: run abc; run 1234; start abc r; hits 2 0 0 9; step late; hits 3 0 3 13; fail late device all r;"
        "count failed_transfer_blocks 3; preempt r; step; hits 3 0 3 13"
    ),
    "a hit is counted once by its request's end": (
        "4+4: run abc; run 1234; start abc r; finish r; hits 3 0 3 13; step; hits 3 0 3 13"
    ),
    "a hit is counted once by a preemption": (
        "4+4: run abc; run 1234; start abc r; preempt r; hits 3 0 3 13; step; hits 3 0 3 13"
    ),
    "a matched request that waits owns nothing": (
        "4+0: run ab; match ab waits; count device_cached_blocks 2; count device_free_blocks 2; table waits;"
        "count device_evictable_blocks 0; count num_requests 1"
    ),
    # ---- a preempted request finds its own work again: that is no hit, and no reason to back anything up
    "a hit that is rolled back starts no backup": (
        "16+16 write_through_selective: run abcdef; start abcdef waits; release waits; step; out 0"
    ),
    "a hit of what a reset made unfindable starts no backup": (
        "16+16 write_through_selective: run abcdef; start abcdef r; reset; step; out 0; finish r; idle"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_swap_in(law: str) -> None:
    play_law(SCENARIOS[law], write_through_threshold=1)


def resumes(cache: CacheManager, *, resumed: bool) -> int:
    """Run and preempt; returns how many blocks were copied out meanwhile."""
    cache.match_prefix("r", prompt("abcdef!"), resumed=resumed)
    cache.allocate("r", 6)
    step = cache.take_swap_step()
    cache.commit("r", 6)
    cache.preempt("r")
    return len(step.swap_out)


def test_hits_of_a_resumed_request_are_counted_apart_and_not_backed_up() -> None:
    scene: Scene = play("step", 16, 16, "write_through_selective", write_through_threshold=1)
    assert [resumes(scene.cache, resumed=resumed) for resumed in (False, True, True)] == [0, 0, 0]
    scene.play("hits 1 0 0 7; count requests_resumed 2; count resumed_hit_tokens 12")
    assert resumes(scene.cache, resumed=False) == 6, "another request's hit"
    scene.count("device_hit_tokens", "6")


def test_host_hits_of_a_resumed_request_are_counted_apart_too() -> None:
    scene = play("step", 6, 6)
    resumes(scene.cache, resumed=False)
    scene.run("123456")
    resumes(scene.cache, resumed=True)
    scene.play("count resumed_hit_tokens 6; count host_hit_tokens 0")
