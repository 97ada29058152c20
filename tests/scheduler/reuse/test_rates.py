"""ReuseRates: its worth against the definition, and what it says of some kinds of traffic."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from fastdeploy_kvcache_v1.scheduler.reuse import rates as module
from fastdeploy_kvcache_v1.scheduler.reuse.rates import CLASSES, NUM_AGES, NUM_CLASSES, ReuseRates, _best_ratios


@pytest.fixture(autouse=True)
def real_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this package tell young ages apart, too."""
    monkeypatch.setattr(module, "AGE_CLASSES", module.age_classes(module.YOUNG_BITS))
    monkeypatch.setattr(module, "AGE_WIDTHS", module.age_widths(module.YOUNG_BITS))


@pytest.mark.parametrize(
    ("young_bits", "first"), [(module.YOUNG_BITS, [0, 8, 12, 16, 23, 32, 46, 64]), (2, [0, 2, 3, 4, 6, 8, 12, 16])]
)
def test_an_octave_of_ages_has_two_classes_and_they_follow_each_other(young_bits: int, first: list[int]) -> None:
    begins = [0, *accumulate(module.age_widths(young_bits)[:-1])]
    assert begins[:8] == first
    classes = module.age_classes(young_bits)
    for age in (*range(200), *(begin + step for begin in begins for step in (-1, 0, 1) if begin)):
        found = classes[(age * age).bit_length()]
        assert begins[found] <= age
        assert found == NUM_AGES - 1 or age < begins[found + 1]


def worth(rates: ReuseRates, use_class: int, age: int) -> float:
    worths, _ = rates.learned(1.0)
    return worths[use_class][module.AGE_CLASSES[(age * age).bit_length()]]


def best_ratio(rates: list[float], age: int) -> float:
    """Over every horizon, one by one."""
    unused, wait, best = 1.0, 0.0, 0.0
    for later in range(age, len(rates)):
        width = module.AGE_WIDTHS[later]
        left = unused / (1 + rates[later] * width)
        wait += width * (unused + left) / 2
        unused = left
        best = max(best, (1 - unused) / wait)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_hull_finds_the_best_horizon_of_every_age(seed: int) -> None:
    dice = random.Random(seed)
    rates = [dice.choice([0.0, dice.random() / (1 + 2**age)]) for age in range(NUM_AGES)]
    assert _best_ratios(rates) == pytest.approx(
        [best_ratio(rates, age) for age in range(NUM_AGES)], rel=1e-6, abs=1e-15
    )


def taught(*lessons: tuple[int, int, float, float]) -> ReuseRates:
    """Each: uses, age, blocks used again, blocks that could have been, times requests."""
    rates = ReuseRates()
    for uses, age, used, exposed in lessons:
        rates.used_again(uses, age, int(used))
        rates.exposed(age, [exposed if use_class == CLASSES[uses] else 0 for use_class in range(NUM_CLASSES)], 1)
    return rates


def test_class_that_is_used_more_often_is_worth_more() -> None:
    rates = taught((0, 10, 10, 10_000), (1, 10, 1_000, 10_000))
    assert worth(rates, 1, 10) > 5 * worth(rates, 0, 10)


def test_block_that_comes_back_late_is_worth_more_just_before_its_next_use() -> None:
    rates = taught((0, 300, 1_000, 10_000), (0, 10, 0, 10_000), (0, 100, 0, 10_000))
    assert worth(rates, 0, 300) > worth(rates, 0, 10) > 0


def test_class_with_little_evidence_is_worth_the_common_rate() -> None:
    rates = taught((0, 10, 1_000, 100_000), (3, 10, 0, 1))
    assert worth(rates, CLASSES[3], 10) == pytest.approx(worth(rates, 0, 10), rel=0.1)


def test_old_lessons_fade() -> None:
    rates = taught((0, 10, 1_000, 10_000))
    before = worth(rates, 0, 10)
    for _ in range(300):
        rates.fade()
        rates.exposed(10, [10_000] + [0] * (NUM_CLASSES - 1), 1)
    assert worth(rates, 0, 10) < before / 50


def test_a_class_that_comes_back_after_a_while_ripens_and_others_do_not() -> None:
    lessons = [(0, age, 0, 10_000) for age in (1, 10, 100)] + [(0, 300, 5_000, 10_000)]
    assert 0 in taught(*lessons).learned(1.0)[1]
    assert taught((0, 4, 5_000, 10_000), (0, 10, 500, 10_000), (0, 100, 50, 10_000)).learned(1.0)[1] == []
