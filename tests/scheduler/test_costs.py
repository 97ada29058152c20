"""What computing is learned to cost, and what is learned of a time that is a sum of two terms."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.contract.messages import PrefillTime, positions
from fastdeploy_kvcache_v1.scheduler.costs import FEWEST_TOKENS, PrefillCosts, TwoTermFit


def test_prefill_cost_is_known_after_a_pass_of_enough_tokens() -> None:
    costs = PrefillCosts()
    costs.computed(PrefillTime(FEWEST_TOKENS - 1, 0.0, 1.0))
    costs.computed(PrefillTime(FEWEST_TOKENS, 0.0, 0.0))
    assert costs.seconds(0, 10) is None
    costs.computed(PrefillTime(FEWEST_TOKENS, 0.0, 2.0 * FEWEST_TOKENS))
    assert costs.seconds(10, 20) == pytest.approx(20.0)


def test_computing_behind_a_long_context_costs_more() -> None:
    """0.001 s per token before each token: 1,600 tokens take 1,281 s, the first 160 of them 13 s."""
    costs = PrefillCosts()
    for start, end in ((0, 100), (0, 1000), (1000, 1200)):
        costs.computed(PrefillTime(end - start, positions(start, end), 0.001 * positions(start, end)))
    assert costs.seconds(0, 1600) == pytest.approx(1280, rel=0.01)
    assert costs.seconds(0, 160) == pytest.approx(12.8, rel=0.01)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slowest_rank_counts(slow: int) -> None:
    costs = PrefillCosts()
    passes = {1 - slow: [PrefillTime(100, 0.0, 100.0)] * 3, slow: [PrefillTime(200, 0.0, 1000.0)], 2: []}
    costs.computed_by_rank(passes)
    assert costs.seconds(0, 10) == pytest.approx(50.0)
    costs.computed_by_rank({})
    costs.computed_by_rank({0: []})
    assert costs.seconds(0, 10) == pytest.approx(50.0), "no news"


# ---- a sum of two terms


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
