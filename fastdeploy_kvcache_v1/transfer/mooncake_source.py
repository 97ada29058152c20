"""MooncakeSource: one peer's tensors, read by an engine that is dropped when a read fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CacheStateError, RemoteReadError
from .plane import Source
from .spans import Spans, require_inside

MOST_SPANS = 2047
"""Of one batch: the engine refuses more than 2,048 as a whole."""
MOST_BYTES = 64 << 20
"""Of one batch: it cannot be interrupted, so the deadline is looked at between batches."""

Regions = Sequence[tuple[int, int]]


class MooncakeSource(Source):
    """A deadline ends a read between two batches; a peer that stands still ends one after the engine's own 2 s."""

    def __init__(self, engine: Any, session: str, theirs: Regions, ours: Regions) -> None:
        """`engine` is used by this source only; regions are `(address, bytes)`."""
        self._engine = engine
        self._session = session
        self._theirs, self._ours = (np.array(regions, np.int64).reshape(-1, 2) for regions in (theirs, ours))
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._is_closing = False

    def read(self, lease: str, spans: Spans, deadline: float) -> None:
        require_inside(spans.table[:, [0, 2, 3]], self._ours[:, 1], "target")
        with self._lock:
            if self._failure is not None:
                raise RemoteReadError(self._failure)
            try:
                self._require_theirs(spans)
                for batch in spans.batches(most_spans=MOST_SPANS, most_bytes=MOST_BYTES):
                    self._read(batch, deadline)
            except RemoteReadError as error:
                self._failure = f"reading {spans.num_bytes} bytes from {self._session} failed: {error}"
                self._engine = None  # waits for its threads: what was queued does not arrive any more
                raise RemoteReadError(self._failure) from None

    def close(self) -> None:
        self._is_closing = True
        with self._lock:
            self._failure = self._failure or "the connection was closed"
            self._engine = None

    def _require_theirs(self, spans: Spans) -> None:
        try:
            require_inside(spans.table[:, [0, 1, 3]], self._theirs[:, 1], "source")
        except CacheStateError as error:
            raise RemoteReadError(str(error)) from None

    def _read(self, batch: Spans, deadline: float) -> None:
        if self._is_closing:
            raise RemoteReadError("the connection was closed")
        if time.monotonic() >= deadline:
            raise RemoteReadError("the peer did not answer in time")
        regions, there, here, counts = batch.table.T
        status = self._engine.batch_transfer_sync_read(
            self._session,
            (self._ours[regions, 0] + here).tolist(),
            (self._theirs[regions, 0] + there).tolist(),
            counts.tolist(),
        )
        if status != 0:
            raise RemoteReadError("mooncake says that the transfer failed")
