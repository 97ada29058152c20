"""Events that overlap: resets, resizes and joins around runs that are still in use or on their way."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.scheduler.cache_manager import SWEPT_PER_STEP

from .scenario import play, play_law

SCENARIOS = {
    "runs in use are not joined across tiers when neither is queued": (
        "3+8 write_through: run ab; step; push 2; run c; step; see ab DH; match ab waits; push 2; match ab retried;"
        "release retried; see ab DH"
    ),
    "what is about to be copied stays where it is when another request has computed it again": (
        "8+8 write_through: start ab one; start ab two; step; commit one 2; finish one; commit two 2;"
        "count duplicate_blocks 2; step; out 0>0 1>1; finish two; count device_free_blocks 6; idle"
    ),
    # ---- a reset
    "a match that waits is void after a reset and its request computes everything": (
        "8+8: run ab; start abcd runs; step; match ab waits; reset; see ab -; grow waits 2; step; uses waits -;"
        "commit runs 4; commit waits 2; finish runs; see abcd DD; finish waits; idle"
    ),
    "a request that ran through a reset caches nothing": (
        "8+0: start ab r; step; reset; commit r 2; see ab -; finish r; idle"
    ),
    "a forced reset frees everything": (
        "3+3: run abc; start xy r; reset forced; count num_requests 0; count device_free_blocks 3;"
        "count host_free_blocks 3; step; out 0; into 0; idle"
    ),
    # ---- a resize
    "a pool shrinks to what is free and cached, and grows": (
        "4+4: run abcd; resize 2; see abcd DD; resize 6; start 123456; stuck 5"
    ),
    "shrinking waits for blocks that are still to be copied out": (
        "4+4: run abcd; start 1 r; release r; stuck 3; step; resize 3"
    ),
    "refused allocations are counted": "2+0: start ab; match 12 r; full r 2; refuse 1; count allocations_refused 2",
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_an_overlap(law: str) -> None:
    play_law(SCENARIOS[law])


def test_step_frees_a_bounded_number_of_runs_that_a_reset_forgot() -> None:
    scene = play("step", SWEPT_PER_STEP + 10)
    cache = scene.cache
    for number in range(SWEPT_PER_STEP + 5):
        scene.run(chr(1000 + number), "r")
    cache.reset_cache()
    cache.take_swap_step()
    assert cache._tree._ruins
    cache.take_swap_step()
    assert not cache._tree._ruins


def test_request_allocated_twice_in_a_step_cannot_commit_in_it() -> None:
    cache = play("start abc r; grow r 4", 4).cache
    with pytest.raises(CacheStateError, match="closed its step"):
        cache.commit("r", 1)
