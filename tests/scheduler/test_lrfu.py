"""The LRFU order: a block stays half a life longer for each doubling of its uses; checked against a sorted list."""

from __future__ import annotations

import random
from math import log2

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse.history import ReuseHistory

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

    def serve(self, text: str, lru_age: int) -> None:
        path = [text[:depth] for depth in range(1, len(text) + 1)]
        others = sorted(self.cached - set(path), key=lambda block: self._order(block, lru_age))
        self.cached |= set(path)
        self.cached -= set(others[: max(0, len(self.cached) - NUM_BLOCKS)])
        self._now += 1
        for block in path:
            self._uses[block] = self._uses.get(block, 0) + 1
            self._last_use[block] = self._now

    def _order(self, block: str, lru_age: int) -> tuple[float, int, int]:
        fewest = max(uses for uses in USES if uses <= self._uses[block])
        worth = log2(fewest) * lru_age / 2 - (self._now - self._last_use[block])
        return worth, self._last_use[block], -len(block)


@pytest.mark.parametrize("seed", range(6))
def test_of_documents_those_stay_that_a_sorted_list_keeps(seed: int) -> None:
    """They come again whole, some more often than others; what was computed anew counts its uses of before."""
    cache, model, dice = manager(NUM_BLOCKS, eviction_policy="lrfu"), SortedBlocks(), random.Random(seed)
    documents = [letter * dice.randint(1, 5) for letter in "abcdefghijkl"]
    num_lost, ages = 0, set()
    for number in range(300):
        text = dice.choices(documents, range(1, 13))[0]
        before = model.cached.copy()
        ages.add(cache._history.lru_age)
        model.serve(text, cache._history.lru_age)
        run(cache, text + "!", str(number))
        num_lost += len(before - model.cached)
        assert {block.decode() for each in cache._tree.runs() for block in each.hashes} == model.cached, number
    assert num_lost > 100
    assert len(ages) > 3
    cache.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_candidates_come_in_the_order_of_worth_where_prompts_share_prefixes(seed: int) -> None:
    cache, dice = manager(40, eviction_policy="lrfu"), random.Random(seed)
    kinds = set()
    for number in range(200):
        text = "".join(dice.choices("abcde", (12, 6, 3, 2, 1), k=dice.randint(1, 6)))
        run(cache, text + "!", str(number))
        bonus = cache._history.lru_age / 2
        worths = [
            (log2(USES[each.kind]) * bonus + each.last_use, each.last_use)
            for each in cache._residency.device_order.candidates()
        ]
        assert worths == sorted(worths)
        kinds |= {each.kind for each in cache._tree.runs()}
    assert len(kinds) == len(USES)


def test_before_anything_had_to_leave_the_order_is_recency() -> None:
    cache = manager(4, eviction_policy="lrfu")
    for text in ("ab!", "ab!", "cd!", "ef!"):
        run(cache, text)
    assert cached(cache, "ab") == []
    assert cached(cache, "cd") == ["device"] * 2


@pytest.mark.parametrize(("uses", "last_stranger"), [(1, 5), (2, 8), (3, 11), (9, 17)])
def test_each_doubling_is_worth_half_a_life(monkeypatch: pytest.MonkeyPatch, uses: int, last_stranger: int) -> None:
    """A life is 8 requests, and 4 strangers fill the rest: the oldest of them is 3 requests old when another comes."""
    monkeypatch.setattr(ReuseHistory, "_refresh", lambda history: None)
    cache = manager(5, eviction_policy="lrfu")
    cache._history.lru_age = 8
    for number in range(uses):
        run(cache, "a!", f"favourite {number}")
    outlasted = 0
    while cached(cache, "a"):
        run(cache, f"{chr(256 + outlasted)}!")
        outlasted += 1
    assert outlasted == last_stranger


def test_what_the_line_expects_leaves_last_but_it_leaves() -> None:
    cache = manager(6, eviction_policy="lrfu")
    for text in ("xy!", "ab!", "ab!", "cd!", "cd!"):
        run(cache, text)
    expect(cache, "xy")
    run(cache, "1234!")
    assert cached(cache, "xy") == ["device"] * 2, "worth less than all others"
    expect(cache, "xy", "1234")
    run(cache, "567890!")
    assert cached(cache, "567890") == ["device"] * 6
    cache.check_idle()


def test_it_is_deterministic() -> None:
    orders = []
    for _ in range(2):
        cache, dice = manager(9, 6, eviction_policy="lrfu"), random.Random(3)
        for number in range(60):
            run(cache, dice.choice(("ab!", "abc!", "cd!", "ef!", "gh!", "xyz!")), str(number))
        host = [each.last_hash for each in cache._residency.host_order.candidates()]
        orders.append((host, cache.stats()))
    assert orders[0] == orders[1]
