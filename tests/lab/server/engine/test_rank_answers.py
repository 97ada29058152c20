"""Answers of several ranks become those of one worker."""

import random

import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, SWAP_OUT, CopyResult, WorkerReport
from fastdeploy_kvcache_v1.errors import InvariantError, RanksDisagreeError
from fastdeploy_kvcache_v1.lab.model.step import StepResult
from fastdeploy_kvcache_v1.lab.server.engine.rank_answers import RankAnswers


def copy(step, kind=SWAP_IN, *, error=None, seconds=1.0):
    return CopyResult(step, *kind, 2, 0 if error else 200, seconds, (4, 5) if error else (), error)


def report(*copies, through=-1, waited=0.0):
    return WorkerReport(copies, waited, through)


def test_a_copy_has_succeeded_when_the_last_rank_says_so():
    answers = RankAnswers(3)
    assert answers.take_report(1, report(copy(7), through=7)).transfers == ()
    assert answers.take_report(0, report(copy(7, seconds=3.0), through=9)).transfers == ()
    answers.check()
    merged = answers.take_report(2, report(copy(7), through=8))
    assert merged == report(copy(7, seconds=3.0), through=7)
    answers.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_failure_on_one_rank_is_told_once_and_when_it_is_known(order):
    answers = RankAnswers(3)
    told = []
    for rank in order:
        result = copy(7, error="torn" if rank == 1 else None)
        told.append(answers.take_report(rank, report(result, through=7)).transfers)
        answers.check()
    at = order.index(1)
    assert [len(each) for each in told] == [int(number == at) for number in range(3)]
    ((failed,),) = (each for each in told if each)
    assert (failed.ok, failed.error, failed.target_slots) == (False, "rank 1: torn", (4, 5))


def test_a_copy_that_fails_on_two_ranks_has_failed_once():
    answers = RankAnswers(2)
    assert len(answers.take_report(1, report(copy(3, error="a"))).transfers) == 1
    assert answers.take_report(0, report(copy(3, error="b"), through=3)).transfers == ()
    answers.take_report(1, report(through=3))
    answers.check()


def test_the_two_copies_of_a_step_are_told_apart():
    answers = RankAnswers(2)
    answers.take_report(0, report(copy(3, SWAP_OUT), copy(3, SWAP_IN), through=3))
    merged = answers.take_report(1, report(copy(3, SWAP_IN, error="torn"), copy(3, SWAP_OUT), through=3))
    assert [(each.target, each.ok) for each in merged.transfers] == [(SWAP_IN[1], False), (SWAP_OUT[1], True)]


def test_a_step_ends_with_the_answer_of_the_last_rank():
    answers = RankAnswers(2)
    tokens = {"a": (1,), "b": (2,)}
    assert answers.take_step(1, StepResult(tokens, report=report(copy(1), waited=0.5))) is None
    answers.check()
    merged = answers.take_step(0, StepResult(tokens, report=report(waited=0.25)))
    assert merged == StepResult(tokens, report=report(waited=0.5))
    answers.check()


def test_what_one_rank_could_not_compute_counts_for_none():
    answers = RankAnswers(2)
    answers.take_step(0, StepResult({"a": (1,)}, retry={"b": "copy"}))
    merged = answers.take_step(1, StepResult({"a": (1,)}, errors={"c": "bug"}))
    assert (merged.retry, merged.errors) == ({"b": "copy"}, {"c": "bug"})


@pytest.mark.parametrize(
    "other",
    [
        StepResult({"a": (2,)}),
        StepResult({}),
        StepResult({"a": (1, 3)}),
        StepResult({"a": (1,)}, drafts={"a": (3,)}),
    ],
)
def test_other_tokens_on_another_rank_are_never_served(other):
    answers = RankAnswers(2)
    answers.take_step(0, StepResult({"a": (1,)}))
    with pytest.raises(RanksDisagreeError):
        answers.take_step(1, other)


def test_a_copy_that_is_reported_twice_is_a_bug():
    answers = RankAnswers(2)
    answers.take_report(0, report(copy(1)))
    with pytest.raises(InvariantError, match="rank 0 reported a copy of step 1 twice"):
        answers.take_report(0, report(copy(1)))


@pytest.mark.parametrize("seed", range(5))
def test_random_orders_decide_each_copy_once_and_by_all_ranks(seed):
    rng = random.Random(seed)
    num_ranks, steps = rng.choice([1, 2, 4]), range(40)
    answers = RankAnswers(num_ranks)
    fails = {(rank, step) for rank in range(num_ranks) for step in steps if rng.random() < 0.1}
    waiting = {rank: list(steps) for rank in range(num_ranks)}
    told = {}
    while any(waiting.values()):
        rank = rng.choice([rank for rank, left in waiting.items() if left])
        now = [waiting[rank].pop(0) for _ in range(min(len(waiting[rank]), rng.randrange(1, 4)))]
        copies = [copy(step, error="torn" if (rank, step) in fails else None) for step in now]
        merged = answers.take_report(rank, report(*copies, through=now[-1]))
        answers.check()
        for each in merged.transfers:
            assert each.step not in told
            told[each.step] = each.ok
        # Whoever reads `ended_through` has seen what became of all copies up to it.
        assert set(range(merged.ended_through + 1)) <= set(told)
    assert told == {step: not any((rank, step) in fails for rank in range(num_ranks)) for step in steps}
