"""Judge: recency first, then what was learned, as long as that finds as much."""

from __future__ import annotations

import random
from math import sqrt
from operator import mul

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse import judge
from fastdeploy_kvcache_v1.scheduler.reuse.judge import Judge, Share


@pytest.fixture(autouse=True)
def terms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "SHORTEST", 8)
    monkeypatch.setattr(judge, "LONGEST", 64)


def test_share_is_a_ratio_of_sums_and_its_error_that_of_the_residuals() -> None:
    dice, share = random.Random(1), Share()
    seen = [(dice.randint(50, 150), dice.randint(80, 120)) for _ in range(60)]
    for found, estimate in seen:
        share.add(found, estimate)
    weights = [judge.DECAY**age for age in reversed(range(60))]
    found, estimate = (sum(map(mul, weights, column)) for column in zip(*seen, strict=True))
    rests = [one - found / estimate * other for one, other in seen]
    assert share.value == pytest.approx(found / estimate)
    assert share.error == pytest.approx(sqrt(sum(map(mul, weights, (rest**2 for rest in rests)))) / found)
    assert (Share().value, Share().error) == (1.0, 0.0)


def term(it: Judge, found: int, estimate: int, most: int = 1000) -> int:
    """Refreshes until it changes its mind, at most `most`."""
    before = it.trusts
    for count in range(1, most + 1):
        it.compare(found, estimate)
        it.refresh()
        if it.trusts is not before:
            return count
    return most


def test_recency_rules_first_and_learned_rates_afterwards() -> None:
    it = Judge()
    assert not it.trusts
    assert term(it, 100, 100) == 8
    assert it.trusts
    assert term(it, 100, 100) == 1000


def test_rates_have_their_shortest_term_however_little_they_hit() -> None:
    it = Judge()
    term(it, 100, 100)
    assert term(it, 1, 100) == 8


def test_rates_that_hit_less_are_dropped_longer_each_time_up_to_a_limit() -> None:
    it = Judge()
    terms = []
    for _ in range(6):
        terms.append(term(it, 100, 100))
        assert it.trusts
        assert term(it, 80, 100) < 50
    assert terms == [8, 16, 32, 64, 64, 64]


def test_estimate_is_calibrated_by_the_real_hits_of_recency() -> None:
    it = Judge()
    term(it, 90, 100)
    assert term(it, 90, 100) == 1000
    it = Judge()
    term(it, 100, 90)
    assert term(it, 90, 90) < 50


def test_loss_above_one_per_cent_is_doubted_if_it_is_significant() -> None:
    it = Judge()
    term(it, 1000, 1000)
    assert term(it, 985, 1000) == 8
    term(it, 1000, 1000)
    assert term(it, 992, 1000) == 1000, "less is never doubted"


def test_rates_that_ruled_long_without_a_loss_are_dropped_for_a_short_term() -> None:
    it = Judge()
    for _ in range(4):
        term(it, 100, 100)
        term(it, 80, 100)
    term(it, 100, 100)
    assert term(it, 100, 100, most=64) == 64
    assert term(it, 80, 100) < 50
    assert term(it, 100, 100) == 16, "twice the shortest"
