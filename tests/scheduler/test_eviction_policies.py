"""What every order of eviction keeps, and the orders that follow from a worth against a sorted list."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log2

import pytest

from fastdeploy_kvcache_v1.scheduler.policies.tables import EVICTION_POLICIES
from fastdeploy_kvcache_v1.scheduler.reuse.history import ReuseHistory
from fastdeploy_kvcache_v1.scheduler.run import Run

from .other_policies import OTHER_POLICIES
from .scenario import cached, manager, play, run

ALL = list(EVICTION_POLICIES)


@pytest.mark.parametrize("order", ALL)
def test_what_the_line_expects_leaves_last_but_it_leaves(order: str) -> None:
    events = "run xy; run ab; run ab; run cd; run cd; waiting xy; run 1234; see xy DD"
    play(f"{events}; waiting xy 1234; run 567890; see 567890 DDDDDD; idle", 6, eviction_policy=order)


@pytest.mark.parametrize("order", ALL)
def test_the_order_is_recency_while_nothing_is_known(order: str) -> None:
    play("run ab; run cd; run ef; see ab -; see cd DD; see ef DD", 4, eviction_policy=order)


@pytest.mark.parametrize("order", ALL)
def test_candidates_are_all_that_can_leave_and_the_same_traffic_leads_to_the_same(order: str) -> None:
    found = []
    for _ in range(2):
        cache, dice = manager(9, 6, eviction_policy=order), random.Random(3)
        for number in range(60):
            run(cache, dice.choice(("ab!", "abc!", "cd!", "ef!", "gh!", "xyz!")), str(number))
        orders = [list(each.candidates()) for each in (cache._residency.device_order, cache._residency.host_order)]
        assert set(orders[0]) == {each for each in cache._tree.runs() if each.on_device}
        assert set(orders[1]) == {each for each in cache._tree.runs() if each.host is not None}
        found.append(([[each.last_hash for each in order] for order in orders], cache.stats()))
    assert found[0] == found[1]


@pytest.mark.parametrize("order", [*ALL, *OTHER_POLICIES])
@pytest.mark.parametrize(("device", "host"), [(4, 0), (4, 8), (2, 4)])
def test_whatever_waited_for_others_or_for_a_request_can_leave_in_the_end(order: str, device: int, host: int) -> None:
    searched = "match pc waits; run 1; release waits; match p waits; run 2; release waits; match pc waits; run 3"
    events = f"run pc; run x; run p; run y; {searched}; release waits; run p; lend {device}; step; back"
    play(f"{events}; resize 12; run abcdefghijkl; run ABCDEFGHIJKL; idle", device, host, eviction_policy=order)


@pytest.mark.parametrize("order", ALL)
def test_the_gauge_says_whether_the_order_is_that_of_recency(order: str) -> None:
    for host in (0, 4):
        assert manager(4, host, eviction_policy=order).stats().recency_rules is (order in ("lru", "adaptive"))


# ---- orders by a worth

USES = (1, 2, 3, 5, 9)
"""By class: the fewest, with the one that computed the block."""

WORTH: dict[str, Callable[[int, int, int], float]] = {
    # order: its worth, of a block's uses, requests since the last one, and the age at which LRU would give it up
    "hyperbolic": lambda uses, age, lru_age: uses / (1 + age),
    "lrfu": lambda uses, age, lru_age: log2(uses) * lru_age / 2 - age,
}
NUM_BLOCKS = 12


class SortedBlocks:
    """Sorts all blocks whenever one has to leave. A block is its prompt up to it."""

    def __init__(self, order: str) -> None:
        self.cached: set[str] = set()
        self._worth = WORTH[order]
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
        last_use = self._last_use[block]
        return self._worth(fewest, self._now - last_use, lru_age), last_use, -len(block)


@pytest.mark.parametrize("order", WORTH)
@pytest.mark.parametrize("seed", range(4))
def test_of_documents_those_stay_that_a_sorted_list_keeps(order: str, seed: int) -> None:
    """They come again whole, some more often than others; what was computed anew counts its uses of before."""
    cache, model, dice = manager(NUM_BLOCKS, eviction_policy=order), SortedBlocks(order), random.Random(seed)
    documents = [letter * dice.randint(1, 5) for letter in "abcdefghijkl"]
    num_lost = 0
    for number in range(250):
        text = dice.choices(documents, range(1, 13))[0]
        before = model.cached.copy()
        model.serve(text, cache._history.lru_age)
        run(cache, text + "!", str(number))
        num_lost += len(before - model.cached)
        assert {block.decode() for each in cache._tree.runs() for block in each.hashes} == model.cached, number
    assert num_lost > 100
    cache.check_idle()


@pytest.mark.parametrize("order", WORTH)
def test_candidates_come_in_the_order_of_worth_where_prompts_share_prefixes(order: str) -> None:
    cache, dice = manager(40, eviction_policy=order), random.Random(1)

    def worth(each: Run) -> tuple[float, int]:
        return WORTH[order](USES[each.kind], cache._history.now - each.last_use, cache._history.lru_age), each.last_use

    kinds = set()
    for number in range(200):
        text = "".join(dice.choices("abcde", (12, 6, 3, 2, 1), k=dice.randint(1, 6)))
        run(cache, text + "!", str(number))
        worths = [worth(each) for each in cache._residency.device_order.candidates()]
        assert worths == sorted(worths)
        kinds |= {each.kind for each in cache._tree.runs()}
    assert len(kinds) == len(USES)


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
