"""A request may be kept from reading the cache, from writing to it, or from both; nobody else notices."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.contract.messages import CacheAccess
from fastdeploy_kvcache_v1.scheduler.open_prefills import OpenPrefills

from .scenario import limited, play, play_law, prompt

SCENARIOS = {
    "one that does not read computes all and leaves it to others": (
        "12+0: run abc; start abcde w/r 0+0; step; commit w/r 5; finish w/r; see abcde DDDDD; count duplicate_blocks 0;"
        "idle"
    ),
    "one that does not read needs no more blocks than it has where nobody uses what is cached": (
        "6+0: run abcd; match abcdef w/r; grow w/r 3; step; commit w/r 3; table w/r 3 4 5; count device_free_blocks 3;"
        "grow w/r 6; step; commit w/r 6; see abcdef DDDDDD; finish w/r; idle"
    ),
    "one that does not read fills what was on the host only": (
        "4+8: run abc; run wxyz; see abc HHH; start abc w/r 0+0; step; commit w/r 3; finish w/r; see abc DDD;"
        "count host_hit_tokens 0; idle"
    ),
    "one that does not write uses the prefix and leaves nothing": (
        "12+0: run abc; start abcde r/w 3+0; step; commit r/w 5; finish r/w; see abcde DDD; count device_free_blocks 9;"
        "idle"
    ),
    "one that does neither leaves no trace": (
        "12+0: run abc; start abcde none 0+0; step; commit none 5; finish none; see abcde DDD; idle"
    ),
    "one that does not read counts as no question to the cache": (
        "12+0: start abc w/r; step; commit w/r 3; finish w/r; start abc r/w; step; finish r/w; hits 2 3 0 4"
    ),
    "a preempted request that does not read finds none of its own work": (
        "12+0: start abcd w/r; step; commit w/r 4; preempt w/r; start abcd w/r 0+0; finish w/r; idle"
    ),
    "of one that does not write there is nothing to be found": (
        "12+0: start abcd r/w; step; commit r/w 4; preempt r/w; start abcd r/w 0+0; finish r/w; idle"
    ),
    "others find what they computed": (
        "12+0: start abcd r; step; commit r 4; preempt r; start abcd r 4+0; finish r; idle"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_an_access(law: str) -> None:
    play_law(SCENARIOS[law])


def test_no_request_waits_for_blocks_that_are_not_written_or_not_read() -> None:
    cache = play("start abcd r/w", 12).cache
    assert not cache.uncommitted("r/w", 5)
    prefills = OpenPrefills(block_size=1, worth_tokens=1)
    prefills.compute("leader", prompt("abcd").hashes)
    assert prefills.to_wait_for(limited("abcd!", "w/r"), 0, []) == 0
    assert prefills.to_wait_for(limited("abcd!", "r/w"), 0, []) == 4


@pytest.mark.parametrize(("name", "kept"), [("r", "DD"), ("w/r", "-")])
def test_a_request_of_the_line_that_reads_nothing_keeps_nothing(name: str, kept: str) -> None:
    scene = play("run ab; run cd", 4)
    assert limited("ab!", name).access == CacheAccess(reads=name == "r")
    scene.cache.expect([limited("ab!", name)])
    scene.play(f"run 12; see ab {kept}")
