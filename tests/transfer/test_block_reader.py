"""The thread that reads a peer's blocks: in order, and not a byte after a cancel has returned."""

import threading
import time
from queue import SimpleQueue

import pytest

from fastdeploy_kvcache_v1.errors import RemoteReadError
from fastdeploy_kvcache_v1.transfer import block_reader
from fastdeploy_kvcache_v1.transfer.block_reader import BlockReader, ReadJob
from fastdeploy_kvcache_v1.transfer.plane import Source
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from tests.transfer.planes import SECRET

FAST = TransferSettings(secret=SECRET, handshake_s=20.0, silence_s=30.0)


class Gated(Source):
    """Each read waits at the plane's gate, and fails where it is closed meanwhile."""

    def __init__(self, plane):
        self.plane, self.is_closed = plane, threading.Event()

    def read(self, lease, spans, deadline):
        self.plane.begun.put(("read", lease, spans.num_bytes, round(deadline - time.monotonic())))
        while not self.plane.gate.wait(0.001):
            if self.is_closed.is_set() and not self.plane.is_deaf:
                raise RemoteReadError("the connection was closed")
        if lease in self.plane.errors:
            raise self.plane.errors[lease]

    def close(self):
        self.plane.begun.put("close")
        self.is_closed.set()


class Plane:
    def __init__(self):
        self.gate, self.errors, self.is_deaf = threading.Event(), {}, False
        self.may_open = threading.Event()
        self.may_open.set()
        self.begun, self.ends = SimpleQueue(), SimpleQueue()

    def open(self, address, deadline):
        self.begun.put(("open", address, round(deadline - time.monotonic())))
        assert self.may_open.wait(20)
        return Gated(self)

    def saw(self, count):
        return [self.begun.get(timeout=20) for _ in range(count)]

    def ended(self, count):
        return [(end.job.lease, end.error) for end in (self.ends.get(timeout=20) for _ in range(count))]


OPEN = ("open", b"peer", 20)


def read(lease, num_bytes=8):
    return ("read", lease, num_bytes, 30)


def job(lease, num_bytes=8):
    return ReadJob(lease, Spans.of([Span(0, 0, 0, num_bytes)]))


@pytest.fixture
def plane():
    return Plane()


@pytest.fixture
def reader(plane):
    made = BlockReader(plane, b"peer", FAST, plane.ends.put)
    yield made
    made.close()


def test_jobs_are_read_in_order_over_one_source(plane, reader, monkeypatch):
    """And in steps, each with a deadline of its own."""
    monkeypatch.setattr(block_reader, "STEP_BYTES", 8)
    plane.gate.set()
    for each in (job("a"), job("b", 20), job("a", 4)):
        reader.submit(each)
    assert plane.ended(3) == [("a", None), ("b", None), ("a", None)]
    assert plane.saw(6) == [OPEN, read("a"), read("b"), read("b"), read("b", 4), read("a", 4)]
    assert plane.begun.empty()


def test_cancel_ends_running_and_waiting_reads_of_its_lease_only(plane, reader):
    for lease in ("a", "b", "a", "c"):
        reader.submit(job(lease))
    assert plane.saw(2) == [OPEN, read("a")]
    reader.cancel("c")
    reader.cancel("nobody")
    assert plane.begun.empty()
    reader.cancel("a")
    assert plane.saw(3) == ["close", OPEN, read("b")]
    plane.gate.set()
    assert plane.ended(1) == [("b", None)]
    reader.submit(job("d"))
    assert plane.ended(1) == [("d", None)]
    assert plane.saw(1) == [read("d")]


def test_a_cancel_returns_when_the_read_has_stopped(plane, reader):
    plane.is_deaf = True
    reader.submit(job("a"))
    assert plane.saw(2) == [OPEN, read("a")]
    thread = threading.Thread(target=reader.cancel, args=("a",))
    thread.start()
    assert plane.saw(1) == ["close"]
    thread.join(0.05)
    assert thread.is_alive()
    plane.gate.set()
    thread.join(20)
    assert not thread.is_alive()
    assert plane.ends.empty()


def test_a_job_that_is_cancelled_while_its_source_opens_is_not_read(plane, reader):
    plane.may_open.clear()
    reader.submit(job("a"))
    assert plane.saw(1) == [OPEN]
    reader.cancel("a")
    reader.submit(job("b"))
    plane.gate.set()
    plane.may_open.set()
    assert plane.ended(1) == [("b", None)]
    assert plane.saw(1) == [read("b")]


@pytest.mark.parametrize(
    ("error", "told"),
    [(RemoteReadError("the link broke"), "the link broke"), (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug")],
)
def test_a_failed_read_is_told_and_the_next_one_has_a_source_of_its_own(plane, reader, error, told):
    plane.errors["a"] = error
    plane.gate.set()
    reader.submit(job("a"))
    reader.submit(job("b"))
    assert plane.ended(2) == [("a", told), ("b", None)]
    assert plane.saw(5) == [OPEN, read("a"), "close", OPEN, read("b")]


def test_a_source_that_opens_while_the_reader_closes_is_closed(plane, reader):
    plane.may_open.clear()
    reader.submit(job("a"))
    assert plane.saw(1) == [OPEN]
    thread = threading.Thread(target=reader.close)
    thread.start()
    while not reader._is_closed:
        time.sleep(0.001)
    thread.join(0.02)
    plane.may_open.set()
    thread.join(20)
    assert plane.saw(1) == ["close"]


@pytest.mark.parametrize("is_reading", [True, False])
def test_close_ends_everything_and_tells_nothing(plane, reader, is_reading):
    reader.submit(job("a"))
    reader.submit(job("b"))
    assert plane.saw(2) == [OPEN, read("a")]
    if not is_reading:
        plane.gate.set()
        assert plane.ended(2) == [("a", None), ("b", None)]
        assert plane.saw(1) == [read("b")]
    reader.close()
    reader.close()
    assert plane.saw(1) == ["close"]
    assert plane.begun.empty()
    assert plane.ends.empty()
    assert not reader._thread.is_alive()
