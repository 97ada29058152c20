"""Which blocks leave a tier first, and what a search for a victim does to blocks in use or on their way: exact blocks.

The order is LRU; what every order must keep is in `test_eviction_policies.py`.
"""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.scheduler.policies import host_duplicates

from .scenario import play, play_law

OLDER_ROOT = "run pc; run xy; run p hit; run 12; step; match pc waits; run 3; see xy H; release waits;"
"""With 2 + 4 blocks: `p` is the oldest block on the host; `c`, below it, was in use during a search, and came back."""

OPEN = "run e; step; start p; start q; start n; step; commit p 1; finish p; commit q 1; finish q; start e hit;"
OPEN += "finish hit; commit n 1; finish n; copied e n;"
"""With 8 + 3 blocks: `p` and `q`, unused, were passed over, for their copies are open; `e` had to go for `n`."""

SCENARIOS = {
    "leaves go first, and the least recently used request before others": (
        "6+0: run abc; run xyz; run ab; run 1; see abc DD; run 2; see xyz DD; run 345; see xyz -; see abc D"
    ),
    "exactly as many blocks are evicted as needed": (
        "8+4: run abcdefg; run 123; out 2; see abcdefg DDDDDHH; count device_evicted_blocks 2; run 456;"
        "see abcdefg DDHHHH; count host_evicted_blocks 1; count host_free_blocks 0"
    ),
    "the first of many children is not preferred": (
        "8+0: run sa; run sb; run sc; run sd; run sa again; run 1234; see sa DD; see sb D; see sc DD; see sd DD"
    ),
    "a leaf goes before its root even if it came back later": (
        "3+0: run pc; run x; run p hit; match pc waits; start y; finish y; release waits; start 12; see pc D"
    ),
    "blocks of one fate used at different times are evicted one by one": (
        "4+0: start ab first; start a second; step; commit first 2; commit second 1; finish first; run c;"
        "finish second; run 12; see ab D; see c D; run 3; see ab D; see c -"
    ),
    "a root that waited for a younger leaf leaves the device right after it": (  # oldest first: `p`, `y`, `1`, `c`
        "4+0: run pc; run x; run p; run y; match pc waits; run 1; release waits; run 2; see y -; see 1 D; run 3;"
        "see 1 -; see pc DD; run 4; see pc D; run 5; see p -; see 2 D; run 6; see 2 -"
    ),
    # ---- the host tier
    "a hit makes the host copy young too": (
        "8+2 write_through: run a; run b; run a again; run c; copied a y; copied b n"
    ),
    "copies that were passed over are still the oldest": (
        f"8+3 write_through: {OPEN} step; run k; copied p n; copied q y; copied n y; copied k y; run m; copied q n;"
        "copied n y; copied m y"
    ),
    "a copy that was passed over may be cut and used before its step": (
        "5+3 write_through: run e; step; start pq; start n; step; commit pq 2; finish pq; start e hit; finish hit;"
        "commit n 1; finish n; start 12; finish 12; step; see pq DH; run k; see pq D"
    ),
    "a copy that was passed over is young after a hit": (
        f"8+3 write_through: {OPEN} start p hit; finish hit; step; run k; copied p y; copied q n; copied n y"
    ),
    "a copy that was passed over can be forgotten": f"8+3 write_through: {OPEN} reset; idle; count host_free_blocks 3",
    "a root waits for a younger leaf and goes right after it": (
        f"2+4: {OLDER_ROOT} run 4; see pc HH; see x -; see 12 HH; run 5; see pc HH; see 12 H; run 6; see pc H; run 7;"
        "see p -"
    ),
    "blocks below one that is waited for go when it is their turn": (
        f"2+4: {OLDER_ROOT} match p waits; run 4; release waits; see pc HH; see x -"
    ),
    # ---- a step in which much happens
    "cells of runs that went out of order all go": "3+1: run abc; push 1; push 2; step; see abc D",
    "shrinking evicts every run of a path once": (
        "4+0: run x; run ab; run a cut; step; resize 1; see x D; see ab -; count device_evicted_blocks 2"
    ),
    "and leaves its host copies": (
        "4+4 write_through: run x; run ab; run a cut; step; resize 1; see x D; see ab HH; count device_evicted_blocks 2"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_an_eviction(law: str) -> None:
    play_law(SCENARIOS[law])


def test_a_root_on_the_device_gives_up_its_host_copy_before_a_younger_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_duplicates, "SHORT_HOST", 0)
    play(
        OLDER_ROOT + "resize 5; run p; run 1234; run p;"  # on the host in the end, oldest first: `c`, `3`, `2`, `p`
        "match pc waits; run 5; release waits; see pc DH; copied pc yy; run 6; see pc DH; copied pc yy; run 7;"
        "see pc DH; copied pc ny",
        *(2, 4),
    )
