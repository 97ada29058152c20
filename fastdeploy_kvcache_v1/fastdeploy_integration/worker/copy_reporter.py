"""CopyReporter: sends a worker rank's reports to the engine."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path

import zmq

from ...contract.messages import CopyResult, PassProgress, PrefillTime, RankCopies, WorkerReport
from ..copy_report import CopyReport

MAX_UNSENT_REPORTS = 64
"""Reports queued in this process for an engine that is slow or not up yet."""

MAX_UNTOLD_FAILURES = 64
"""Failed copies kept until a report can be sent. The engine does not need older ones."""

MAX_UNTOLD_TIMES = 32
"""Prefill times kept until a report can be sent: the latest are worth most."""


class CopyReporter:
    """Sends the results of one rank's copies, in step order. Not thread-safe: the worker's event loop uses it.

    Never waits for the engine and never raises because of it: a report that cannot be sent is part of the next one.
    The engine may start later, end, or restart at the same path. The socket is made at the first report, so the
    process may fork before.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._worker = f"{os.getpid()}-{time.time_ns()}"
        self._number = 0
        self._copies = RankCopies()
        self._untold: deque[CopyResult] = deque()
        self._prefills: deque[PrefillTime] = deque(maxlen=MAX_UNTOLD_TIMES)
        self._unlisted_through = -1
        self._ended_through = -1
        self._passes: PassProgress | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def tell(self, report: WorkerReport) -> None:
        """Send `report` if it has news. Prefill times alone wait for the next news. The first report is sent as soon as
        the copy paths are known.
        """
        self._copies = report.copies or self._copies
        self._prefills.extend(report.prefills)
        has_news = report.transfers or report.ended_through > self._ended_through or report.passes is not None
        if not has_news and (self._number or not self._copies.paths):
            return
        self._passes = report.passes or self._passes
        self._ended_through = max(self._ended_through, report.ended_through)
        self._untold.extend(result for result in report.transfers if not result.ok)
        while len(self._untold) > MAX_UNTOLD_FAILURES:
            self._unlisted_through = max(self._unlisted_through, self._untold.popleft().step)
        if self._socket is None:
            self._socket = self._connect()
        news = WorkerReport(
            tuple(self._untold),
            ended_through=self._ended_through,
            passes=self._passes,
            prefills=tuple(self._prefills),
            copies=self._copies,
        )
        message = CopyReport(self._rank, self._worker, self._number, news, self._unlisted_through).dumps()
        self._number += 1
        with contextlib.suppress(zmq.Again):  # queue full: the engine counts the gap in the numbers
            self._socket.send(message, zmq.NOBLOCK)
            self._untold.clear()
            self._prefills.clear()

    def _connect(self) -> zmq.Socket[bytes]:
        self._context = zmq.Context()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, MAX_UNSENT_REPORTS)
        socket.set(zmq.LINGER, 0)  # the end of the worker does not wait for the engine
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(f"ipc://{self._path}")
        return socket

    def close(self) -> None:
        """Drop unsent reports. Idempotent."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = self._socket = None
