"""One-sided planes: the reader moves the bytes by itself, and the peer's process takes no part.

So no peer looks at a lease: grants are kept by the readers, who ask after each read whether the lease was open.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import CacheStateError, RemoteReadError
from ..worker.ops.rows import BlockRows
from .plane import DataPlane, Source
from .spans import Spans, require_inside

__all__ = ["OneSidedPlane", "OneSidedSource", "Ranges", "Region"]

Region = tuple[int, int]
"""Address and bytes of one tensor."""
Ranges = npt.NDArray[np.int64]
"""`[ranges, 3]`: the peer's address, ours, bytes."""


class OneSidedSource(Source):
    """Reads in batches that cannot be interrupted: between two of them, deadline and `close` are looked at."""

    most_spans: ClassVar[int]
    most_bytes: ClassVar[int]
    """Of one batch."""

    def __init__(self, peer: str, theirs: Sequence[Region], ours: Sequence[Region]) -> None:
        """`peer` is named in errors."""
        self._peer = peer
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
                for batch in spans.batches(most_spans=self.most_spans, most_bytes=self.most_bytes):
                    self._require_wanted(deadline)
                    self._copy(self._ranges(batch), deadline)
            except (RemoteReadError, RuntimeError) as error:  # CuPy raises RuntimeErrors
                self._end(f"reading {spans.num_bytes} bytes from {self._peer} failed: {error}")
                raise RemoteReadError(self._failure) from None

    def close(self) -> None:
        self._is_closing = True
        with self._lock:
            self._end("the connection was closed")

    @abstractmethod
    def _copy(self, ranges: Ranges, deadline: float) -> None:
        """One batch; all bytes are there when it returns. Raises `RemoteReadError` or `RuntimeError`."""

    @abstractmethod
    def _let_go(self) -> None:
        """Once, and no byte can arrive when it returns. Never raises."""

    def _end(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._let_go()

    def _require_theirs(self, spans: Spans) -> None:
        try:
            require_inside(spans.table[:, [0, 1, 3]], self._theirs[:, 1], "source")
        except CacheStateError as error:
            raise RemoteReadError(str(error)) from None

    def _require_wanted(self, deadline: float) -> None:
        if self._is_closing:
            raise RemoteReadError("the connection was closed")
        if time.monotonic() >= deadline:
            raise RemoteReadError("the peer did not answer in time")

    def _ranges(self, batch: Spans) -> Ranges:
        regions, there, here, counts = batch.table.T
        return np.stack((self._theirs[regions, 0] + there, self._ours[regions, 0] + here, counts), axis=1)


class OneSidedPlane(DataPlane):
    """Keeps what was registered, and the sources that are open."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._owners: list[BlockRows] = []
        self._sources: weakref.WeakSet[OneSidedSource] = weakref.WeakSet()
        self._lock = threading.Lock()

    def register(self, regions: Sequence[BlockRows]) -> None:
        if self._regions:
            raise CacheStateError("tensors were registered already: a plane is made for one set of them")
        if any(not region.is_dense for region in regions):
            raise CacheStateError("a tensor that peers read must be one contiguous range")
        self._register(regions)
        self._owners = list(regions)
        self._regions = [region_of(region) for region in regions]

    def grant(self, lease: str, slots: Collection[int]) -> None:
        """See the module."""

    def revoke(self, lease: str) -> None:
        """See the module."""

    @abstractmethod
    def _register(self, regions: Sequence[BlockRows]) -> None:
        """See `register`."""

    def _opened(self, source: OneSidedSource) -> OneSidedSource:
        with self._lock:
            self._sources.add(source)
        return source

    def _close_sources(self) -> None:
        with self._lock:
            sources = list(self._sources)
        for source in sources:
            source.close()


def region_of(rows: BlockRows) -> Region:
    return rows.address, rows.num_rows * rows.row_bytes
