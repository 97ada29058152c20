"""BlockReader: the thread that reads one peer's blocks, in the order in which they were asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import KVCacheError
from .plane import DataPlane, Source
from .settings import TransferSettings
from .spans import Spans

__all__ = ["BlockReader", "ReadEnd", "ReadJob"]

logger = logging.getLogger(__name__)

STEP_BYTES = 64 << 20
"""Have `silence_s` to arrive: a slow network is no failure, and one that stands still is."""
STEP_SPANS = 1 << 20


@dataclass(frozen=True, eq=False)
class ReadJob:
    """Spans to be read under a lease."""

    lease: str
    spans: Spans


@dataclass(frozen=True, eq=False)
class ReadEnd:
    """A job that ended, with `error` None when every byte is there. Cancelled ones have no end."""

    job: ReadJob
    error: str | None


class BlockReader:
    """`submit` never blocks. `cancel` and `close` do, until no byte can arrive any more."""

    def __init__(
        self, plane: DataPlane, address: bytes, settings: TransferSettings, on_end: Callable[[ReadEnd], None]
    ) -> None:
        """`on_end` is called on the reader's thread."""
        self._plane = plane
        self._address = address
        self._settings = settings
        self._on_end = on_end
        self._jobs: deque[ReadJob] = deque()
        self._running: ReadJob | None = None
        self._is_cancelled = False
        """The running job is."""
        self._source: Source | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-transfer-read", daemon=True)
        self._thread.start()

    def submit(self, job: ReadJob) -> None:
        """Read it after all that were submitted before."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def cancel(self, lease: str) -> None:
        """Forget the jobs of `lease`. When this returns, no byte of them can arrive any more."""
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.lease != lease)
            if self._running is None or self._running.lease != lease:
                return
            self._is_cancelled = True
            job = self._running
            source, self._source = self._source, None
        if source is None:
            return  # it is being opened, and is not read then
        source.close()  # the read raises, and the next job opens another source
        with self._changed:
            self._changed.wait_for(lambda: self._running is not job)

    def close(self) -> None:
        """As `cancel` for every lease, and the thread ends. Idempotent."""
        with self._changed:
            self._is_closed = self._is_cancelled = True
            self._jobs.clear()
            self._changed.notify_all()
        self._drop()
        self._thread.join()
        self._drop()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                job = self._running = self._jobs.popleft()
                self._is_cancelled = False
            error = self._read(job)
            with self._changed:
                self._running = None
                is_cancelled = self._is_cancelled or self._is_closed
                self._changed.notify_all()
            if not is_cancelled:
                self._on_end(ReadEnd(job, error))

    def _read(self, job: ReadJob) -> str | None:
        try:
            for step in job.spans.batches(most_spans=STEP_SPANS, most_bytes=STEP_BYTES):
                source = self._open()
                if source is None:
                    return "cancelled"
                source.read(job.lease, step, time.monotonic() + self._settings.silence_s)
            return None
        except KVCacheError as error:
            self._drop()
            return str(error)
        except Exception as error:  # thread edge: one job fails, the reader goes on
            logger.exception("reading blocks of a peer failed")
            self._drop()
            return f"{type(error).__name__}: {error}"

    def _open(self) -> Source | None:
        """The source, opened where there is none; None when the job has been cancelled. Who cancels later closes the
        source that this returned, and so ends the read.
        """
        with self._changed:
            if self._is_cancelled or self._source is not None:
                return None if self._is_cancelled else self._source
        source = self._plane.open(self._address, time.monotonic() + self._settings.handshake_s)
        with self._changed:
            self._source = source
            return None if self._is_cancelled else source

    def _drop(self) -> None:
        with self._changed:
            source, self._source = self._source, None
        if source is not None:
            source.close()
