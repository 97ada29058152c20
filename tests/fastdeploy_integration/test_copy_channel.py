"""The way back from workers to the engine, over real sockets."""

import json
import os
import pickle
import socket
import time
from contextlib import ExitStack, closing
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from fastdeploy_kvcache_v1.contract.messages import (
    SWAP_IN,
    SWAP_OUT,
    CopyPath,
    CopyResult,
    CopyTotals,
    PassProgress,
    PrefillTime,
    RankCopies,
    WorkerReport,
)
from fastdeploy_kvcache_v1.errors import ConfigError, MessageVersionError
from fastdeploy_kvcache_v1.fastdeploy_integration.copy_report import (
    SHAPE,
    CopyReport,
    shape_of,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import copy_reports
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.copy_reports import CopyReports
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.copy_reporter import (
    MAX_UNSENT_REPORTS,
    MAX_UNTOLD_FAILURES,
    MAX_UNTOLD_TIMES,
    CopyReporter,
)

LIMIT_S = 30.0


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.01)


class Worker:
    """What it has counted goes with its reports, as a worker's cache does it."""

    def __init__(self, reporter, paths=()):
        self.reporter, self.copies = reporter, RankCopies(paths=paths)
        self.close = reporter.close

    def tell(self, report):
        for each in report.transfers:
            self.copies.add(each)
        self.reporter.tell(replace(report, copies=self.copies))


def copied(step, blocks=1, error=None):
    slots = () if error is None else (step,)
    return WorkerReport((CopyResult(step, *SWAP_OUT, blocks, 10 * blocks, 0.0, slots, error),))


def failed(*steps):
    return [copied(step, error="injected") for step in steps]


def blocks_by_rank(reports):
    return {report.rank: report.news.copies.swap_out.blocks for report in reports.latest()}


def steps_failed(reports, count):
    """The steps of the next `count` failed copies, in the order in which they are told."""
    steps = []

    def take():
        steps.extend(result.step for result in reports.take().failed)
        return len(steps) >= count

    wait_for(take, f"{count} failed copies, of which these are there: {steps}")
    return steps


@pytest.fixture
def path(tmp_path):
    return tmp_path / "own" / "copies"


@pytest.fixture
def channel(path):
    """Both ends, of which each is closed in the end."""
    with ExitStack() as stack:

        def worker(rank=0, paths=()):
            return stack.enter_context(closing(Worker(CopyReporter(path, rank), paths)))

        yield SimpleNamespace(worker=worker, reports=lambda: stack.enter_context(closing(CopyReports(path))))


# ---- what arrives


def test_each_ranks_failures_arrive_once_and_in_step_order(channel):
    workers = [channel.worker(rank) for rank in range(2)]
    told = failed(*range(40))
    workers[0].tell(told[0])  # before there is an engine
    reports = channel.reports()
    for step in range(1, 40):
        workers[step % 2].tell(told[step])
    steps = steps_failed(reports, 40)
    assert [[step for step in steps if step % 2 == rank] for rank in (0, 1)] == [[*range(0, 40, 2)], [*range(1, 40, 2)]]
    assert reports.take().failed == ()
    assert (reports.num_lost, reports.num_unreadable) == (0, 0)
    assert {report.rank: report.news.copies.swap_out.failures for report in reports.latest()} == {0: 20, 1: 20}


def test_the_first_step_tells_how_the_worker_copies(channel):
    paths = CopyPath("in", "kernel"), CopyPath("out", "batch", "it hangs")
    reports, worker = channel.reports(), channel.worker(2, paths)
    for report in (WorkerReport(), WorkerReport(), WorkerReport(), copied(1)):
        worker.tell(report)
    wait_for(lambda: blocks_by_rank(reports) == {2: 1}, "a block")
    (report,) = reports.latest()
    assert (report.number, report.news.copies.paths) == (1, paths), "two reports: the first, and the copy's"


def test_what_prefills_took_arrives_once_and_by_rank(channel):
    prefills = tuple(PrefillTime(100 + each, 7.0, 0.5) for each in range(MAX_UNTOLD_TIMES + 5))
    reports, worker, other = channel.reports(), channel.worker(rank=0), channel.worker(rank=1)
    for prefill in prefills:
        worker.tell(WorkerReport(prefills=(prefill,)))  # these wait for a copy
    worker.tell(copied(1))
    worker.tell(copied(2))
    other.tell(WorkerReport(copied(3).transfers, prefills=prefills))
    wait_for(lambda: [each.number for each in reports.latest()] in ([1, 0], [0, 1]), "three reports")
    latest = prefills[-MAX_UNTOLD_TIMES:]
    assert reports.take().prefills == {0: latest, 1: latest}
    other.tell(copied(6))
    wait_for(lambda: [each.number for each in reports.latest() if each.rank] == [1], "another report")
    assert reports.take().prefills == {}, "each once"


def test_ended_steps_and_passes_arrive_by_rank(channel):
    reports, worker, progress = channel.reports(), channel.worker(1), PassProgress(7, 0.5)
    worker.tell(WorkerReport(ended_through=6, passes=progress))
    wait_for(lambda: reports._has_news, "a report")
    news = reports.take()
    assert (news.ended_through, news.passes) == ({1: 6}, {1: progress})
    worker.tell(WorkerReport(ended_through=8))
    wait_for(lambda: reports._has_news, "another report")
    news = reports.take()
    assert (news.ended_through, news.passes) == ({1: 8}, {1: progress}), "the latest that is known"


# ---- who ends and starts again


def test_an_engine_that_starts_again_learns_the_totals_also_after_one_that_was_killed(path, channel):
    worker, reports = channel.worker(), channel.reports()
    assert (path.parent.stat().st_mode & 0o777, path.is_socket()) == (0o700, True)
    worker.tell(copied(0, blocks=2))
    wait_for(lambda: blocks_by_rank(reports) == {0: 2}, "2 blocks")
    reports.close()
    assert not path.parent.exists()
    worker.tell(copied(1, blocks=3))
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # as it does: nobody could remove it
    reports = channel.reports()
    worker.tell(copied(2, blocks=4))
    wait_for(lambda: blocks_by_rank(reports) == {0: 9}, "9 blocks")


def test_another_worker_of_a_rank_counts_from_0(channel):
    reports = channel.reports()
    for steps in ((1, 2, 3), (4,)):
        worker = channel.worker()
        for report in failed(*steps):
            worker.tell(report)
        assert steps_failed(reports, len(steps)) == list(steps)
        worker.close()
    assert [report.news.copies.swap_out.failures for report in reports.latest()] == [3, 1]
    assert reports.num_lost == 0


# ---- bounds


def test_without_an_engine_reports_are_lost_and_the_next_one_makes_up_for_them(channel):
    worker, lost = channel.worker(), [MAX_UNSENT_REPORTS + each for each in range(3)]
    for report in [*map(copied, range(MAX_UNSENT_REPORTS)), *failed(*lost)]:
        worker.tell(report)
    reports = channel.reports()
    wait_for(lambda: blocks_by_rank(reports) == {0: MAX_UNSENT_REPORTS}, "what was in the queue")
    assert reports.take().failed == ()
    worker.tell(copied(1000))
    assert steps_failed(reports, 3) == lost
    wait_for(lambda: blocks_by_rank(reports) == {0: MAX_UNSENT_REPORTS + 1}, "the last report")
    assert reports.num_lost == 3


def test_an_engine_that_does_not_read_holds_nobody_back(path, channel):
    """A socket that is bound and never read."""
    path.parent.mkdir()
    with zmq.Context.instance().socket(zmq.PULL) as engine:
        engine.set(zmq.RCVHWM, 1)
        engine.bind(f"ipc://{path}")
        worker = channel.worker()
        for report in failed(*range(2_000)):
            worker.tell(report)
        reporter = worker.reporter
        assert (reporter._number, len(reporter._untold)) == (2_000, MAX_UNTOLD_FAILURES), "older ones are dropped"
        engine.set(zmq.LINGER, 0)


def test_failures_that_nobody_takes_are_bounded(channel, monkeypatch):
    monkeypatch.setattr(copy_reports, "MAX_FAILURES", 4)
    reports, worker = channel.reports(), channel.worker()
    for report in failed(*range(10)):
        worker.tell(report)
    wait_for(lambda: [each.number for each in reports.latest()] == [9], "the last report")
    news = reports.take()
    assert ([result.step for result in news.failed], news.unlisted_through) == ([6, 7, 8, 9], 5)


class Explosive:
    def __reduce__(self):
        return os.abort, ()


def test_what_is_no_report_is_counted_said_once_and_never_unpickled(path, channel, caplog, monkeypatch):
    monkeypatch.setattr(copy_reports, "MAX_REPORT_BYTES", 200_000)
    junk, push = [b"", b"junk", pickle.dumps(Explosive()), b"[99]", b"[" * 100_000], zmq.Context.instance().socket
    reports = channel.reports()
    with push(zmq.PUSH) as sender, push(zmq.PUSH) as other:
        for each in (other, sender):
            each.connect(f"ipc://{path}")
        other.send(b"[" * 200_001)  # it is not even read
        for message in junk:
            sender.send(message)
        wait_for(lambda: reports.num_unreadable == len(junk), "the junk")
        channel.worker().tell(copied(0))
        wait_for(lambda: blocks_by_rank(reports) == {0: 1}, "a report behind the junk")
        assert reports.num_unreadable == len(junk)
    assert len([each for each in caplog.messages if each.startswith("ignored an unreadable report of copies")]) == 1


# ---- the directory


def open_to_others(directory):
    directory.mkdir()
    directory.chmod(0o770)


def a_link(directory):
    elsewhere = directory.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)


def has_no_room(directory):
    (directory / "copies").mkdir(parents=True)
    directory.chmod(0o700)


NOT_PRIVATE = r"(only this user can enter|cannot make the directory).*TMPDIR"


@pytest.mark.parametrize(
    ("make", "reason"),
    [(open_to_others, NOT_PRIVATE), (a_link, NOT_PRIVATE), (Path.touch, NOT_PRIVATE), (has_no_room, "make the socket")],
)
def test_a_directory_that_somebody_else_could_have_made_is_refused(path, make, reason):
    make(path.parent)
    with pytest.raises(ConfigError, match=reason):
        CopyReports(path)


# ---- the message


PATHS = CopyPath("in", "kernel"), CopyPath("out", "batch", "it hangs")
COPIES = RankCopies(CopyTotals(1, 2, 0.5, 3), CopyTotals(4, 5, 0.25, 6), exposed_wait_total_s=0.125, paths=PATHS)
FAILED = (
    CopyResult(7, *SWAP_OUT, 2, 0, 0.0, (4, 5), "OSError: bus error"),
    CopyResult(8, *SWAP_IN, 1, 0, 0.0, (9,), "late"),
)


@pytest.mark.parametrize("failed", [(), FAILED])
def test_a_report_survives_the_message(failed):
    prefills = PrefillTime(100, 5000.5, 0.3), PrefillTime(64, 1.0, 1e-5)
    for passes in (None, PassProgress(8, 12345.678901234567), PassProgress(-1, 0.1, True)):
        report = CopyReport(3, "17-1", 12, WorkerReport(failed, 0.5, 8, passes, prefills, COPIES), 2)
        assert CopyReport.loads(report.dumps()) == report


def test_a_report_with_another_field_is_refused_in_one_line():
    """Nobody counts versions: a worker of another version counts something else."""
    more = make_dataclass("RankCopies", [("seconds_asleep", float, 0.0)], bases=(RankCopies,))
    other = msgspec.defstruct("CopyReport", [("rank", int), ("copies", more)])
    message = msgspec.json.encode((shape_of(other), other(0, more())))
    with pytest.raises(MessageVersionError, match=f"got a copy report of version .*, expected {SHAPE}") as refused:
        CopyReport.loads(message)
    assert "\n" not in str(refused.value)


def message(**changed):
    whole = msgspec.to_builtins(CopyReport(0, "w", 0, WorkerReport(FAILED, copies=COPIES)))
    news = whole["news"] | changed
    return json.dumps([SHAPE, {**whole, "news": news}]).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"null",
        b"[6, 0]",
        pickle.dumps("a report"),
        json.dumps([SHAPE]).encode(),
        json.dumps([SHAPE, {}]).encode(),
        json.dumps([SHAPE, [0, "w", 0]]).encode(),
        message(exposed_wait_since_last_s="x"),
        message(copies={"swap_in": {"blocks": "many"}}),
        message(transfers=[[1, "device", "moon", 1, [1], "e"]]),
        message(ended_through=None),
        message(passes=[0, "x", True]),
        message(prefills=[[1, 2]]),
    ],
)
def test_what_is_no_report_is_a_value_error(garbage):
    assert CopyReport.loads(message()).rank == 0, "the others differ from this one"
    with pytest.raises(ValueError, match=r"."):
        CopyReport.loads(garbage)
