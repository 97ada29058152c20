"""Which blocks form one run: the fewer there are, the less every operation costs."""

from __future__ import annotations

import pytest

from .scenario import block, play, play_law


def little_by_little(name: str, first: int, last: int) -> str:
    """Allocated, computed and committed up to each of these numbers of tokens, one step per token."""
    return "".join(f"grow {name} {tokens}; step; commit {name} {tokens};" for tokens in range(first, last + 1))


SCENARIOS = {
    "what one request computes step by step is one run": (
        f"8+0: match abcdef r; {little_by_little('r', 1, 6)} shape abcdef"
    ),
    "so is what a request adds below a prefix it found": (
        f"8+0: run ab; match abcdef r; {little_by_little('r', 3, 6)} shape abcdef"
    ),
    "hits that the policy counts keep runs apart and more of them do not": (
        f"8+8 write_through_selective: run ab; match abcdef r; {little_by_little('r', 3, 6)} shape ab cdef; finish r;"
        "run abcdef 1; shape ab cdef; run abcdef 2; shape abcdef; run abcdef 3; shape abcdef"
    ),
    "two users of a run do not share what one of them adds": (
        f"8+0: match abcd r; {little_by_little('r', 1, 2)} match ab waits 2; {little_by_little('r', 3, 4)} shape ab cd;"
        "uses waits DD; release waits; shape abcd"
    ),
    "runs cut by a match are joined when the request that cut them is rolled back": (
        "8+8 write_through: run abcd; step; start ab; start abc; start a; shape a b c d; release abc; release a;"
        "release ab; shape abcd"
    ),
    "runs hit differently stay apart": "8+8 write_through_selective: run abcd; run ab; shape ab cd",
    "a match that ends where a run ends cuts nothing": "8+0: run ab; match abc r; shape ab",
    "a fork keeps its stem apart": "8+0: run abc; run abx; shape ab c x; match ab r; release r; shape ab c x",
    "runs that are neighbours on the device only stay apart": (
        "3+3 write_through: run ab; match a cut; run x; finish cut; step; resize 2; match ab again; release again;"
        "shape a b x"
    ),
    "a run on the host is not joined with one that was swapped in": (
        "2+4: run pc; run xy; start p in; step; match pc waits; release in; see pc DH; shape p c x y"
    ),
    "a request joins its runs when nothing keeps them apart any more": (  # else others leave a chain of them behind
        f"16+0: match abcdef r; {little_by_little('r', 1, 2)} match a aborted; finish aborted;"
        f"{little_by_little('r', 3, 3)} shape abc; match ab aborted; finish aborted;"
        f"{little_by_little('r', 4, 4)} shape abcd"
    ),
    "a request whose blocks others continue does not grow between them": (
        "16+0: start aby r; start abx other; step; commit r 2; commit other 3; finish other; commit r 3; shape ab x y;"
        "see abx DDD; see aby DDD"
    ),
    "blocks that others cached first are walked over run by run": (
        "16+0: start abcd first; start abcd second; step; commit first 4; start a; commit second 3; uses second DDD;"
        "shape a bc d"
    ),
    "a run is moved up to one of at least half its length": (
        f"16+0: match abcdef r; {little_by_little('r', 1, 2)} match ab waits;"
        f"{little_by_little('r', 3, 6)} release waits; finish r; shape abcdef"
    ),
    "a longer one is not moved": (  # its blocks would be moved again for every run above that shares their fate later
        f"16+0: match abcd r; {little_by_little('r', 1, 1)} match a waits; {little_by_little('r', 2, 4)} release waits;"
        "finish r; shape a bcd"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_the_shape(law: str) -> None:
    play_law(SCENARIOS[law], write_through_threshold=2)


def test_runs_that_are_not_neighbours_in_eviction_order_stay_apart() -> None:
    """Joined they would have one age, which neither of them has."""
    scene = play("run ab; start a cut; run x; finish cut", 8)  # `a` is younger than `x`, `b` is older
    top = scene.cache._tree.root.children.get(block("a"))
    assert top is not None
    top.hits = 0
    scene.play("match ab again; release again; shape a b x")
