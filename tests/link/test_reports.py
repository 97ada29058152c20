"""Reports of several ranks: each failed copy once, bounded, and nothing said to have ended before its failure."""

import random
from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.contract.messages import (
    MOST_IN_A_REPORT,
    SWAP_IN,
    SWAP_OUT,
    CopyPath,
    CopyResult,
    PassProgress,
    PrefillTime,
    RankCopies,
    WorkerReport,
)
from fastdeploy_kvcache_v1.link.messages import MessageTypes, decode, encode
from fastdeploy_kvcache_v1.link.reports import FailedCopies, Reports

TYPES = MessageTypes()


def failed(step, kind=SWAP_OUT, error="torn"):
    return CopyResult(step, *kind, 2, 0, 1.0, (4, 5), error)


def copied(step, kind=SWAP_OUT):
    return CopyResult(step, *kind, 2, 200, 1.0)


def report(*copies, through=-1):
    return WorkerReport(copies, 0.0, through)


def test_a_report_survives_the_link():
    copies = RankCopies(paths=(CopyPath("in", "kernel"), CopyPath("out", "batch", "it hangs")))
    copies.add(copied(1))
    prefills = (PrefillTime(100, 5000.5, 0.3),)
    whole = WorkerReport((failed(7), copied(8)), 0.5, 8, PassProgress(8, 12345.678901234567), prefills, copies, 3)
    for each in (WorkerReport(), whole, replace(whole, passes=PassProgress(-1, 0.1, True))):
        assert decode(TYPES.to_engine, encode(each)) == each


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_failure_on_some_ranks_is_told_once_and_when_it_is_known(order):
    copies, told = FailedCopies(3), []
    for rank in order:
        result = copied(7) if rank == 0 else failed(7, error=f"torn at {rank}")
        told.append(copies.take(rank, report(result, through=7)))
    first = next(rank for rank in order if rank)
    assert [len(each) for each in told] == [int(rank == first) for rank in order]
    ((one,),) = (each for each in told if each)
    assert (one.error, one.target_slots) == (f"rank {first}: torn at {first}", (4, 5))
    assert not copies._told, "every rank has told of that step"


def test_the_two_copies_of_a_step_are_told_apart():
    copies = FailedCopies(1)
    assert copies.take(0, report(failed(3), copied(3, SWAP_IN))) == (failed(3),)
    assert copies.take(0, report(failed(3, SWAP_IN), through=3)) == (failed(3, SWAP_IN),)


@pytest.mark.parametrize("seed", range(5))
def test_reports_in_random_orders_tell_each_failure_once_and_in_time(seed):
    rng = random.Random(seed)
    num_ranks, steps = rng.choice([1, 2, 4]), range(60)
    reports = Reports(num_ranks)
    fails = {(rank, step) for rank in range(num_ranks) for step in steps if rng.random() < 0.1}
    waiting = {rank: list(steps) for rank in range(num_ranks)}
    told, ended = [], [-1] * num_ranks
    while any(waiting.values()):
        rank = rng.choice([rank for rank, left in waiting.items() if left])
        now = [waiting[rank].pop(0) for _ in range(min(len(waiting[rank]), rng.randrange(1, 4)))]
        reports.put(rank, report(*(failed(step) for step in now if (rank, step) in fails), through=now[-1]))
        for number, each in reports.take() if rng.random() < 0.5 else ():
            told += [result.step for result in each.transfers]
            ended[number] = each.ended_through
        assert {step for rank, step in fails if step <= ended[rank]} <= set(told)
    told += [result.step for _, each in reports.take() for result in each.transfers]
    assert sorted(told) == sorted({step for _, step in fails})
    assert reports.take() == ()


def test_reports_that_nobody_takes_are_bounded_and_say_what_they_lost():
    reports, num = Reports(2), MOST_IN_A_REPORT + 5
    for step in range(num):
        copies = RankCopies(exposed_wait_total_s=float(step))
        prefill = (PrefillTime(step, 1.0, 1.0),)
        passes = PassProgress(step, 0.0) if step == 3 else None
        reports.put(1, WorkerReport((failed(step),), 0.5, step, passes, prefill, copies))
    reports.put(1, report(through=2))
    ((rank, merged),) = reports.take()
    assert (rank, merged.ended_through, merged.unlisted_through) == (1, num - 1, 4)
    assert [each.step for each in merged.transfers] == [*range(5, num)]
    assert [each.num_tokens for each in merged.prefills] == [*range(5, num)]
    assert (merged.passes, merged.exposed_wait_since_last_s) == (PassProgress(3, 0.0), num / 2)
    assert reports.copies[1].exposed_wait_total_s == num - 1


def test_copies_that_were_made_are_dropped_without_a_word():
    merged = report(copied(1))
    for step in range(2, MOST_IN_A_REPORT + 5):
        merged = merged.merged(report(copied(step)))
    assert (len(merged.transfers), merged.unlisted_through) == (MOST_IN_A_REPORT, -1)
