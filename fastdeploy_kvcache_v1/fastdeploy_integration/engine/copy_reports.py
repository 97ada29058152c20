"""CopyReports: the engine's end of the way back from its worker ranks."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from ...contract.messages import CacheLevel, CopyResult, PassProgress, PrefillTime
from ...errors import ConfigError, MessageVersionError
from ...link.place import make_private
from ...telemetry.metrics import counter, source
from ..copy_report import CopyReport

logger = logging.getLogger(__name__)

MAX_WAITING_REPORTS = 256
"""Of one worker, in the socket of this process. Further ones wait in the worker, which counts what it cannot keep."""

MAX_REPORT_BYTES = 1 << 24

MAX_FAILURES = 256
"""Failed copies that wait for the schedule loop. It can do without older ones: docs/operate/fastdeploy.md."""

MAX_TOLD = 1024
"""Failed copies that are not told again when another rank's report has them."""

MAX_TIMES = 256
"""Passes of a rank that wait for the schedule loop. The latest say most."""

POLL_MS = 200
"""How soon the thread sees that it has to end."""


class CopyNews(NamedTuple):
    """What the schedule loop has to know of copies, since it asked last."""

    failed: tuple[CopyResult, ...] = ()
    """Each once, however many ranks it failed on, in step order of the rank that told it first."""
    ended_through: Mapping[int, int] = {}  # never written
    """By rank, see `WorkerReport.ended_through`. Of the ranks that have said more."""
    unlisted_through: int = -1
    """Copies of this step and earlier ones may have failed without being in `failed`, now or before."""
    passes: Mapping[int, PassProgress] = {}  # never written
    """By rank, as `ended_through`."""
    prefills: Mapping[int, Sequence[PrefillTime]] = {}  # never written
    """By rank, as `ended_through`: a batch waits for the slowest."""


NO_NEWS = CopyNews()


@source("workers' reports")
class CopyReports:
    """The last report of every worker process, and which copies failed.

    A thread of its own reads the socket, so no caller waits for it. Thread-safe but for `close`.
    """

    num_lost: int = counter(
        "Lost reports of workers about copies; the next report makes up for them", "copy_reports_lost"
    )
    """Between others of the same worker: it had no room for them, or the engine was away."""
    num_unreadable: int = counter("Unreadable messages on the socket for workers' reports", "copy_reports_unreadable")

    def __init__(self, path: Path) -> None:
        """Makes the directory of `path`, which only this user can enter, and the socket in it.

        Raises `ConfigError` when that is not possible.
        """
        self.num_lost = self.num_unreadable = 0
        self._path = path
        self._latest: dict[str, CopyReport] = {}
        self._lock = threading.Lock()
        """Of what the next `take` returns: a copy is never said to have ended before its failure is told."""
        self._failed: deque[CopyResult] = deque()
        self._told: dict[tuple[int, CacheLevel], None] = {}
        """Step and target of failed copies that were or are in `_failed`, in order."""
        self._ended_through: dict[int, int] = {}
        self._unlisted_through = -1
        self._passes: dict[int, PassProgress] = {}
        self._prefills: defaultdict[int, deque[PrefillTime]] = defaultdict(lambda: deque(maxlen=MAX_TIMES))
        self._has_news = False
        self._closing = threading.Event()
        make_private(path.parent)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._bind()
        self._thread = threading.Thread(target=self._receive, name="kv-copy-reports", daemon=True)
        self._thread.start()

    def _bind(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        socket.set(zmq.RCVHWM, MAX_WAITING_REPORTS)
        socket.set(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
        try:
            socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot make the socket {self._path}: {error}; set TMPDIR to another place") from None
        return socket

    def latest(self) -> tuple[CopyReport, ...]:
        """The last report of each worker process that has sent any."""
        return tuple(self._latest.values())

    def take(self) -> CopyNews:
        """What was reported since the last call. O(1) when that is nothing."""
        if not self._has_news:
            return NO_NEWS
        with self._lock:
            prefills = {rank: tuple(each) for rank, each in self._prefills.items()}
            news = CopyNews(tuple(self._failed), self._ended_through, self._unlisted_through, self._passes, prefills)
            self._failed.clear()
            self._prefills.clear()
            self._ended_through, self._passes = {}, {}
            self._has_news = False
            return news

    def close(self) -> None:
        """The socket and its directory are gone. Idempotent."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
        with contextlib.suppress(OSError):  # it is gone already
            shutil.rmtree(self._path.parent)

    def _receive(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(POLL_MS):
                self._take(self._socket.recv())

    def _take(self, message: bytes) -> None:
        try:
            report = CopyReport.loads(message)
        except (ValueError, RecursionError, MessageVersionError) as error:  # what arrives must not end the thread
            if not self.num_unreadable:
                logger.warning("ignored an unreadable report of copies (further ones are only counted): %s", error)
            self.num_unreadable += 1
            return
        if (before := self._latest.get(report.worker)) is not None:
            self.num_lost += report.number - before.number - 1
        self._latest[report.worker] = report
        news = report.news
        with self._lock:
            for result in news.transfers:
                if (name := (result.step, result.target)) not in self._told:
                    self._told[name] = None
                    self._failed.append(result)
            while len(self._told) > MAX_TOLD:
                del self._told[next(iter(self._told))]
            self._unlisted_through = max(self._unlisted_through, report.unlisted_through)
            while len(self._failed) > MAX_FAILURES:
                self._unlisted_through = max(self._unlisted_through, self._failed.popleft().step)
            self._ended_through[report.rank] = news.ended_through
            if news.passes is not None:
                self._passes[report.rank] = news.passes
            if news.prefills:
                self._prefills[report.rank].extend(news.prefills)
            self._has_news = True
