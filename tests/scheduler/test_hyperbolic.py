"""The hyperbolic order: uses divided by age, checked block by block against a sorted list."""

from __future__ import annotations

import random

import pytest

from .scenario import cached, expect, manager, run

NUM_BLOCKS = 12


USES = (1, 2, 3, 5, 9)
"""By class: the fewest, with the one that computed the block."""


class SortedBlocks:
    """Sorts all blocks whenever one has to leave. A block is its prompt up to it."""

    def __init__(self) -> None:
        self.cached: set[str] = set()
        self._uses: dict[str, int] = {}
        self._last_use: dict[str, int] = {}
        self._now = 0

    def serve(self, text: str) -> None:
        path = [text[:depth] for depth in range(1, len(text) + 1)]
        others = sorted(self.cached - set(path), key=self._order)
        self.cached |= set(path)
        self.cached -= set(others[: max(0, len(self.cached) - NUM_BLOCKS)])
        self._now += 1
        for block in path:
            self._uses[block] = self._uses.get(block, 0) + 1
            self._last_use[block] = self._now

    def _order(self, block: str) -> tuple[float, int, int]:
        later_uses, last_use = self._uses[block] - 1, self._last_use[block]
        fewest = max(uses for uses in USES if uses <= 1 + later_uses)
        return fewest / (1 + self._now - last_use), last_use, -len(block)


@pytest.mark.parametrize("seed", range(6))
def test_of_documents_those_stay_that_a_sorted_list_keeps(seed: int) -> None:
    """They come again whole, some more often than others; what was computed anew counts its uses of before."""
    cache, model, dice = manager(NUM_BLOCKS, eviction_policy="hyperbolic"), SortedBlocks(), random.Random(seed)
    documents = [letter * dice.randint(1, 5) for letter in "abcdefghijkl"]
    num_lost = 0
    for number in range(200):
        text = dice.choices(documents, range(1, 13))[0]
        before = model.cached.copy()
        model.serve(text)
        run(cache, text + "!", str(number))
        num_lost += len(before - model.cached)
        assert {block.decode() for each in cache._tree.runs() for block in each.hashes} == model.cached, number
    assert num_lost > 100
    cache.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_candidates_come_in_the_order_of_uses_by_age_where_prompts_share_prefixes(seed: int) -> None:
    cache, dice = manager(40, eviction_policy="hyperbolic"), random.Random(seed)
    kinds = set()
    for number in range(200):
        text = "".join(dice.choices("abcde", (12, 6, 3, 2, 1), k=dice.randint(1, 6)))
        run(cache, text + "!", str(number))
        worths = [
            (USES[each.kind] / (1 + cache._history.now - each.last_use), each.last_use)
            for each in cache._residency.device_order.candidates()
        ]
        assert worths == sorted(worths)
        kinds |= {each.kind for each in cache._tree.runs()}
    assert len(kinds) == len(USES)


def test_a_favourite_outlasts_strangers_and_is_given_up_in_the_end() -> None:
    cache = manager(4, eviction_policy="hyperbolic")
    for number in range(4):
        run(cache, "ab!", f"favourite {number}")
    kept = []
    for number in range(9):
        run(cache, f"{number}!")
        kept.append(len(cached(cache, "ab")))
    assert kept == [2, 2, 2, 2, 2, 1, 1, 1, 0]


def test_what_the_line_expects_leaves_last_but_it_leaves() -> None:
    cache = manager(6, eviction_policy="hyperbolic")
    for text in ("xy!", "ab!", "ab!", "cd!", "cd!"):
        run(cache, text)
    expect(cache, "xy")
    run(cache, "1234!")
    assert cached(cache, "xy") == ["device"] * 2, "worth less than all others"
    expect(cache, "xy", "1234")
    run(cache, "567890!")
    assert cached(cache, "567890") == ["device"] * 6
    cache.check_idle()


def test_it_is_deterministic_and_its_candidates_are_all_that_can_leave() -> None:
    cache = manager(9, eviction_policy="hyperbolic")
    for text in ("ab!", "ab!", "cd!", "ef!", "cd!", "gh!"):
        run(cache, text)
    order = [each.last_hash.decode() for each in cache._residency.device_order.candidates()]
    assert order == [each.last_hash.decode() for each in cache._residency.device_order.candidates()]
    assert order == ["ef", "ab", "cd", "gh"]


@pytest.mark.parametrize(
    ("policy", "recency"), [("lru", True), ("hyperbolic", False), ("lrfu", False), ("adaptive", True)]
)
def test_the_gauge_says_whether_the_order_is_that_of_recency(policy: str, recency: bool) -> None:
    assert manager(4, eviction_policy=policy).stats().recency_rules is recency
    assert manager(4, 4, eviction_policy=policy).stats().recency_rules is recency
