"""ReuseRates: its worth against the definition, and what it says of some kinds of traffic."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse.rates import (
    AGE_CLASSES,
    AGE_WIDTHS,
    NUM_AGES,
    ReuseRates,
    _best_ratios,
)

COUNT = 5
"""Classes of one kind."""


def test_an_octave_of_ages_has_two_classes_and_they_follow_each_other() -> None:
    begins = [0, *accumulate(AGE_WIDTHS[:-1])]
    assert begins[:8] == [0, 1024, 1449, 2048, 2897, 4096, 5793, 8192]
    for age in (*range(0, 20_000, 7), *(begin + step for begin in begins for step in (-1, 0, 1) if begin)):
        found = AGE_CLASSES[(age * age).bit_length()]
        assert begins[found] <= age
        assert found == NUM_AGES - 1 or age < begins[found + 1]


def worth(rates: ReuseRates, number: int, seconds: int, doubt: float = 1.0) -> float:
    age = 1024 * seconds
    return rates.learned(doubt)[number][AGE_CLASSES[(age * age).bit_length()]]


def best_ratio(rates: list[float], age: int) -> float:
    """Over every horizon, one by one."""
    unused, wait, best = 1.0, 0.0, 0.0
    for later in range(age, len(rates)):
        width = AGE_WIDTHS[later]
        left = unused / (1 + rates[later] * width)
        wait += width * (unused + left) / 2
        unused = left
        best = max(best, (1 - unused) / wait)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_hull_finds_the_best_horizon_of_every_age(seed: int) -> None:
    dice = random.Random(seed)
    rates = [dice.choice([0.0, dice.random() / (1024 + 2**age)]) for age in range(NUM_AGES)]
    assert _best_ratios(rates) == pytest.approx(
        [best_ratio(rates, age) for age in range(NUM_AGES)], rel=1e-6, abs=1e-15
    )


def exposed(rates: ReuseRates, number: int, seconds: int, weight: float) -> None:
    rates.exposed(1024 * seconds, [weight * (each == number) for each in range(COUNT)], 1)


def taught(*lessons: tuple[int, int, float, float]) -> ReuseRates:
    """Each: class, age in seconds, blocks used again, blocks that could have been, times ticks."""
    rates = ReuseRates(COUNT)
    for number, seconds, used, could in lessons:
        rates.used_again(number, 1024 * seconds, used)
        exposed(rates, number, seconds, could)
    return rates


def test_class_that_is_used_more_often_is_worth_more() -> None:
    rates = taught((0, 10, 10, 1e7), (1, 10, 1_000, 1e7))
    assert worth(rates, 1, 10) > 5 * worth(rates, 0, 10)


def test_block_that_comes_back_late_is_worth_more_just_before_its_next_use() -> None:
    rates = taught((0, 300, 1_000, 1e7), (0, 10, 0, 1e7), (0, 100, 0, 1e7))
    assert worth(rates, 0, 300) > worth(rates, 0, 10) > 0


def test_class_with_little_evidence_is_worth_the_common_rate() -> None:
    rates = taught((0, 10, 1_000, 1e8), (3, 10, 0, 1e3))
    assert worth(rates, 3, 10) == pytest.approx(worth(rates, 0, 10), rel=0.1)


def test_old_lessons_fade() -> None:
    rates = taught((0, 10, 1_000, 1e7))
    before = worth(rates, 0, 10)
    for _ in range(300):
        rates.fade()
        exposed(rates, 0, 10, 1e7)
    assert worth(rates, 0, 10) < before / 50


def test_a_class_without_evidence_is_like_the_others_of_its_kind_alone() -> None:
    rates = ReuseRates(2, 3)
    rates.used_again(0, 0, 1_000)
    rates.used_again(2, 0, 10)
    rates.exposed(0, [1e7, 0, 1e7, 0, 0], 1)
    often, like_often, rare, *like_rare = (worths[0] for worths in rates.learned(1.0, 1.0))
    assert like_often == pytest.approx(often, rel=0.01)
    assert like_rare == pytest.approx([rare] * 2, rel=0.1)
    assert often > 50 * rare


def test_doubt_of_its_kind_says_how_soon_a_class_is_believed() -> None:
    """It came back ten times as often as the others of its kind, 50 times up to now."""
    rates = taught((0, 10, 1_000, 1e8), (1, 10, 50, 5e5))
    much, little = (worth(rates, 1, 10, doubt) / worth(rates, 0, 10, doubt) for doubt in (1, 1e4))
    assert much > 4
    assert 1 <= little < 1.1


def test_class_is_rare_below_an_eighth_of_the_use_of_its_kind() -> None:
    for uses, is_rare in ((10, True), (13, False)):
        rates = ReuseRates(1, 2)
        rates.used_again(0, 0, 0.1)  # of another kind
        rates.used_again(1, 0, 100)
        rates.used_again(2, 0, uses)
        rates.exposed(0, [1e9, 1e6, 1e6], 1)
        assert rates.is_rare(2, 1) is is_rare
        assert not rates.is_rare(1, 1)
    assert ReuseRates(1, 2).is_rare(2, 1), "nothing is known"


def test_predictions_are_what_the_learned_rates_expect_of_new_chances() -> None:
    rates = taught((0, 10, 1_000, 1e7))
    assert rates.predicted == [0.0] * COUNT, "nothing was learned yet"
    rates.learned(1e-6)
    exposed(rates, 0, 10, 5e6)
    assert rates.predicted == pytest.approx([500, 0, 0, 0, 0], rel=1e-3)


def test_old_observations_fade_as_slowly_when_their_unit_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def learned(most_unit: float) -> list[list[float]]:
        monkeypatch.setattr("fastdeploy_kvcache_v1.scheduler.reuse.rates.MOST_UNIT", most_unit)
        rates = ReuseRates(2)
        for number in range(100):
            rates.used_again(0, 3_000 + 10 * number, 1.0)
            rates.exposed(3_000, [1.0, 2.0], 1_000)
            rates.fade()
        return rates.learned(1.0)

    often, never = learned(1.1), learned(1e9)
    assert [pytest.approx(row) for row in often] == never
    assert often[0] != often[1]
