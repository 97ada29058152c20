"""What is loaded and what is computed, for given rates; what is learned of a time that is a sum of two terms."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.scheduler.link_costs import MOST_SURPRISE, PROBE_EVERY
from fastdeploy_kvcache_v1.scheduler.load_costs import FEWEST_TOKENS, LoadCosts
from fastdeploy_kvcache_v1.scheduler.two_term_fit import TwoTermFit
from fastdeploy_kvcache_v1.timings import LoadTime, PrefillTime, positions

BLOCK = 16
MUCH = 10**6


def copied(costs: LoadCosts, num_tokens: float, seconds: float) -> None:
    costs.loaded(LoadTime(num_tokens / BLOCK, seconds))  # type: ignore[arg-type]  # parts of blocks are as good here


def computed(costs: LoadCosts, num_tokens: int, num_positions: float, seconds: float) -> None:
    costs.computed(PrefillTime(num_tokens, num_positions, seconds))


def measured(copy_s: float, compute_s: float) -> LoadCosts:
    """Seconds per token of a swap-in, and of computing."""
    costs = LoadCosts(BLOCK)
    copied(costs, 100, 100 * copy_s)
    computed(costs, 100, 0.0, 100 * compute_s)
    return costs


def chosen(costs: LoadCosts, num_blocks: int, num_uncached: int, **options: int) -> int:
    """Of a prompt that has nothing on the device."""
    return costs.blocks_to_load(num_blocks, 0, num_blocks * BLOCK + num_uncached, **options)


def test_everything_is_loaded_until_both_rates_are_known() -> None:
    unknown, no_steps, no_copies = LoadCosts(BLOCK), LoadCosts(BLOCK), LoadCosts(BLOCK)
    copied(no_steps, 100, 1000.0)
    computed(no_steps, FEWEST_TOKENS - 1, 0.0, 0.001)
    computed(no_copies, 100, 0.0, 0.001)
    for costs in (unknown, no_steps, no_copies):
        assert chosen(costs, 50, 10, budget=MUCH) == 50
    computed(no_steps, FEWEST_TOKENS, 0.0, 0.001)
    assert chosen(no_steps, 50, 10, budget=MUCH) == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 10, 1000])
def test_copies_that_beat_computing_bring_everything(num_blocks: int) -> None:
    assert chosen(measured(1.0, 1.0), num_blocks, 1, budget=MUCH) == num_blocks


def test_what_is_computed_besides_hides_a_slow_copy() -> None:
    """10 blocks take 320 s to load, and 160 s to compute."""
    costs = measured(2.0, 1.0)
    assert chosen(costs, 10, 160, budget=MUCH) == 10, "320 s for these 160 tokens and the blocks"
    assert chosen(costs, 10, 60, budget=MUCH, num_planned=100) == 10, "others in the batch"
    assert chosen(costs, 10, 159, budget=MUCH) == 6, "96 tokens in 192 s, while 223 are computed"
    assert chosen(costs, 10, 160, budget=100) == 3, "only 100 s of it in this batch, where 50 tokens arrive"


def test_a_copy_that_costs_much_in_itself_is_worth_it_for_long_prefixes_only() -> None:
    """100 s and 0.01 s per token, against 1 s per token."""
    costs = measured(0.0, 1.0)
    for num_tokens in (10, 1000, 300, 2000):
        copied(costs, num_tokens, 100 + 0.01 * num_tokens)
    assert [chosen(costs, num_blocks, 1, budget=MUCH) for num_blocks in (1, 3, 6)] == [0, 0, 0]
    assert chosen(costs, 7, 1, budget=MUCH) == 7
    assert chosen(costs, 1, 200, budget=MUCH) == 1, "hidden by its own other tokens"


def test_computing_behind_a_long_context_costs_more() -> None:
    """0.001 s per token before each token: 1,600 tokens take 1,281 s, the first 160 of them 13 s."""
    costs = LoadCosts(BLOCK)
    for start, end in ((0, 100), (0, 1000), (1000, 1200)):
        computed(costs, end - start, positions(start, end), 0.001 * positions(start, end))
    copied(costs, 100, 30.0)
    assert chosen(costs, 100, 1, budget=MUCH) == 100
    assert chosen(costs, 10, 1, budget=MUCH) < 10
    assert costs.blocks_to_load(10, 1440, 1601, budget=MUCH) == 10


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slowest_rank_counts_whoever_measured_last(slow: int) -> None:
    costs = LoadCosts(BLOCK)
    for rank, seconds in ((0, 200.0 if slow == 0 else 1.0), (1, 200.0 if slow == 1 else 1.0)):
        costs.loaded(LoadTime(10, seconds * 1.6), rank)
    costs.computed(PrefillTime(100, 0.0, 100.0), 1 - slow)
    assert chosen(costs, 10, 160, budget=MUCH) == 10, "320 s to load, as long as computing"
    assert chosen(costs, 10, 159, budget=MUCH) == 6
    costs.computed(PrefillTime(100, 0.0, 200.0), slow)
    assert chosen(costs, 10, 1, budget=MUCH) == 10, "322 s to compute on the slower rank"


def test_one_slow_moment_changes_nothing() -> None:
    costs = measured(0.1, 1.0)
    for _ in range(3):
        copied(costs, 100, 100 * 100.0)
        assert chosen(costs, 20, 10, budget=MUCH) == 20
        for _ in range(8):
            copied(costs, 100, 100 * 0.1)


def test_a_tier_that_has_become_slow_is_known_after_a_few_copies() -> None:
    costs = measured(0.1, 1.0)
    for _ in range(20):
        copied(costs, 100, 100 * 1000.0)
    assert chosen(costs, 20, 10, budget=MUCH) == 0
    exactly = measured(1000.0, 1.0)
    assert costs._copy_s(100) > exactly._copy_s(100) / MOST_SURPRISE


def test_a_hopeless_tier_is_tried_now_and_then() -> None:
    costs = measured(1e6, 1.0)
    counts = [chosen(costs, 20, 10, budget=MUCH) for _ in range(3 * PROBE_EVERY)]
    assert counts == ([0] * (PROBE_EVERY - 1) + [1]) * 3


def test_one_probe_is_enough_to_see_that_it_is_fast_again() -> None:
    costs = measured(1e6, 1.0)
    while not chosen(costs, 20, 10, budget=MUCH):
        pass
    copied(costs, BLOCK, 0.1 * BLOCK)
    assert chosen(costs, 20, 10, budget=MUCH) == 20


def saved(costs: LoadCosts, num_blocks: int, num_uncached: int, level: CacheLevel = CacheLevel.HOST) -> float | None:
    return costs.seconds_saved(num_blocks, 0, num_blocks * BLOCK + num_uncached, level)


def test_what_a_tier_saves_is_known_as_soon_as_computing_is() -> None:
    costs = LoadCosts(BLOCK)
    copied(costs, 100, 100.0)
    assert saved(costs, 10, 1) is None
    costs = LoadCosts(BLOCK)
    computed(costs, 100, 0.0, 100.0)
    assert saved(costs, 10, 1) == pytest.approx(160)


def test_a_copy_that_computing_does_not_hide_saves_less() -> None:
    """10 blocks take 160 s to compute, and 80 s to copy."""
    costs = measured(0.5, 1.0)
    assert saved(costs, 10, 80) == pytest.approx(160)
    assert saved(costs, 10, 20) == pytest.approx(160 + 20 - 80)
    assert saved(costs, 10, 20, CacheLevel.DEVICE) == pytest.approx(160), "no copy"


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
