"""Who waits for the store, for given times of it and of computing."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.storage.engine.store_costs import MOST_SURPRISE, PIECE_BLOCKS, PROBE_EVERY, StoreCosts

BLOCK = 16


def costs_of(per_block_s: float | None, saved_s: float | None, latency_s: float = 0.0) -> StoreCosts:
    """Measured, where it is not None: loads of any size, and what a request saves for each block."""
    costs = StoreCosts(BLOCK)
    if saved_s is not None:
        costs.compute_s = lambda start, end: (end - start) / BLOCK * saved_s
    for count in (1, PIECE_BLOCKS) * 20 if per_block_s is not None else ():
        assert per_block_s is not None
        costs.loaded(count, latency_s + count * per_block_s)
    return costs


def waits(costs: StoreCosts, num_blocks: int, num_ahead: int = 0, *, has_asked: bool = True) -> bool:
    return costs.is_worth_waiting(0, num_blocks, num_ahead=num_ahead, has_asked=has_asked)


def test_all_wait_until_both_are_measured() -> None:
    assert waits(costs_of(None, 0.001), 10)
    assert waits(costs_of(1e6, None), 10)


@pytest.mark.parametrize("num_blocks", [1, 10, 100])
def test_who_waits_is_sooner_with_the_store(num_blocks: int) -> None:
    assert waits(costs_of(0.9, 1.0), num_blocks)
    assert not waits(costs_of(1.1, 1.0), num_blocks)


def test_each_piece_costs_something_in_itself() -> None:
    costs = costs_of(0.5, 1.0, latency_s=4.0)
    assert not waits(costs, 7)
    assert waits(costs, 9)
    assert waits(costs, PIECE_BLOCKS)
    assert not waits(costs_of(0.9, 1.0, latency_s=4.0), 10 * PIECE_BLOCKS), "ten of them"


def test_loads_for_others_come_first() -> None:
    costs = costs_of(0.5, 1.0)
    assert waits(costs, 10, 9)
    assert not waits(costs, 10, 11)
    assert waits(costs_of(0.5, 1.0, latency_s=4.0), 10)
    assert not waits(costs_of(0.5, 1.0, latency_s=4.0), 10, 1), "and are a piece of their own"


def test_the_question_counts_until_it_is_answered() -> None:
    costs = costs_of(0.5, 1.0)
    costs.asked(6.0)
    assert not waits(costs, 10, has_asked=False)
    assert waits(costs, 10)
    assert waits(costs, 20, has_asked=False)
    costs.asked(1.0)
    assert waits(costs, 10, has_asked=False), "one fast answer is enough"
    costs.asked(6.0)
    assert waits(costs, 10, has_asked=False), "one slow answer is not"


def test_what_computing_costs_is_asked_for_the_missing_blocks() -> None:
    asked = []
    costs = StoreCosts(BLOCK)
    costs.compute_s = lambda *question: asked.append(question)  # type: ignore[func-returns-value]
    assert costs.is_worth_waiting(3, 10, num_ahead=0, has_asked=True)
    assert asked == [(3 * BLOCK, 10 * BLOCK)]


@pytest.mark.parametrize(
    ("begin", "end", "num_tokens", "count"),
    [(0, 10, 10 * BLOCK + 1, 4), (0, 10, 10 * BLOCK + 16, 3), (0, 10, 11 * BLOCK + 48, 0), (7, 10, 10 * BLOCK + 1, 3)],
)
def test_end_of_some_prompts_is_computed_until_its_cost_is_known(
    begin: int, end: int, num_tokens: int, count: int
) -> None:
    costs = costs_of(1.0, None)
    counts = [costs.blocks_to_compute(begin, end, num_tokens) for _ in range(2 * PROBE_EVERY)]
    assert counts == ([0] * (PROBE_EVERY - 1) + [count]) * 2
    known = costs_of(1.0, 1.0)
    assert not any(known.blocks_to_compute(begin, end, num_tokens) for _ in range(2 * PROBE_EVERY))


def test_what_took_no_time_says_nothing() -> None:
    costs = costs_of(None, 1e-9)
    costs.loaded(0, 1.0)
    costs.loaded(1, 0.0)
    assert waits(costs, 10), "nothing is known"


def test_one_slow_moment_counts_four_times_what_was_expected() -> None:
    costs = costs_of(1.0, 1.0)
    costs.loaded(PIECE_BLOCKS, 1e6)
    assert waits(costs_like(costs, MOST_SURPRISE), 10)
    for _ in range(20):
        costs.loaded(PIECE_BLOCKS, 1e6)
    assert not waits(costs_like(costs, 1000.0), 10), "a store that has become slow is known after a few"


def costs_like(costs: StoreCosts, saved_s: float) -> StoreCosts:
    """The same, and each block saves so much."""
    costs.compute_s = lambda start, end: (end - start) / BLOCK * saved_s
    return costs


def test_slow_store_is_probed_now_and_then_and_one_fast_probe_counts() -> None:
    costs = costs_of(1e6, 1.0)
    assert [costs.declined() for _ in range(3 * PROBE_EVERY)] == ([False] * (PROBE_EVERY - 1) + [True]) * 3
    costs.not_tried()
    assert costs.declined(), "nothing was there to try"
    costs.loaded(10, 1.0)
    assert waits(costs, 10)
    costs.waits()
    assert not costs.declined()


def test_a_fast_piece_is_one_of_many_while_requests_wait() -> None:
    costs = costs_of(1.0, 0.5)
    costs.waits()
    costs.loaded(10, 0.1)
    assert not waits(costs, 10)
