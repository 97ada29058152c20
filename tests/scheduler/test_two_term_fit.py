"""What is learned of a time that is a sum of two terms."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.scheduler.two_term_fit import TwoTermFit


def fitted(*samples: tuple[float, float, float]) -> TwoTermFit:
    fit = TwoTermFit()
    for sample in samples:
        fit.measured(*sample)
    return fit


@pytest.mark.parametrize(("per_first", "per_second"), [(2.0, 3.0), (0.0, 3.0), (2.0, 0.0), (1e-5, 2.0)])
def test_two_different_measurements_tell_both_terms(per_first: float, per_second: float) -> None:
    fit = fitted(*[(first, 1.0, per_first * first + per_second) for first in (5.0, 50.0, 700.0)])
    for first in (1.0, 20.0, 10_000.0):
        assert fit.value(first, 1.0) == pytest.approx(per_first * first + per_second, rel=1e-4)


def test_equal_measurements_are_put_down_to_the_first_term() -> None:
    assert fitted(*[(10.0, 1.0, 40.0)] * 5).value(20.0, 1.0) == pytest.approx(80.0)


def test_no_term_is_negative() -> None:
    rng = random.Random(1)
    for _ in range(500):
        fit = fitted(*[(rng.uniform(1, 99), rng.uniform(0, 9), rng.uniform(0, 9)) for _ in range(rng.randrange(1, 6))])
        assert fit.value(1.0, 0.0) >= 0
        assert fit.value(0.0, 1.0) >= 0
        assert fit.value(1.0, 1.0) > 0


def test_nothing_is_known_at_first() -> None:
    assert not TwoTermFit().is_known
    assert fitted((1.0, 1.0, 1.0)).is_known


def test_the_past_is_forgotten() -> None:
    fit = fitted(*[(first, 1.0, 500.0 * first) for first in (5.0, 50.0)])
    for _ in range(20):
        for first in (5.0, 50.0):
            fit.measured(first, 1.0, 2.0 * first + 1)
    assert fit.value(10.0, 1.0) == pytest.approx(21.0, rel=0.05)
