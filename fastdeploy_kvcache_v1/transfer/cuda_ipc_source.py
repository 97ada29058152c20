"""CudaIpcSource: one peer's tensors, mapped into this process, copied by this process's GPU."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import CacheStateError, KVCacheError, RemoteReadError
from ..worker import ops
from ..worker.ops.compiled import Path
from ..worker.ops.peer_memory import PeerMemory
from ..worker.runtime.cuda import CudaStream, use_device
from .plane import Source
from .presence import Visit
from .spans import Spans, require_inside

__all__ = ["CudaIpcSource", "Mapped"]

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Of one batch: what was submitted cannot be called back, and a GPU moves so much in milliseconds."""
MOST_SPANS = 1 << 14

_LOOK_S = 0.02
"""Between two looks whether the read is still wanted; the event is looked at more often."""

Regions = Sequence[tuple[int, int]]


class Mapped:
    """Allocations of a peer that are mapped here, and the sign for it that its owner waits for."""

    def __init__(self, memory: PeerMemory, gpu: int, visit: Visit) -> None:
        """`gpu`: the number of the one that maps them. Owns `visit`."""
        self.memory = memory
        self.gpu = gpu
        self._visit = visit
        self._bases: list[int] = []

    def map(self, handle: bytes) -> int:
        """Where it begins here. Raises as `PeerMemory.open`."""
        self._bases.append(self.memory.open(handle))
        return self._bases[-1]

    def owner_is_alive(self) -> bool:
        """Its memory is there; what is left of it afterwards must not be touched."""
        return self._visit.owner_is_alive()

    def close(self) -> None:
        """Once; copies have run. Never raises: on a GPU that is lost nothing is mapped any more."""
        for base in self._bases:
            try:
                use_device(self.gpu)
                self.memory.close(base)
            except (KVCacheError, RuntimeError) as error:  # CuPy raises RuntimeErrors
                logger.warning("memory of a peer cannot be given back: %s", error)
        self._visit.close()


class CudaIpcSource(Source):
    """Copies run on a stream of their own, in batches; between two of them, and while one runs, deadline and `close`
    are looked at. A batch that has begun is waited for: it is the end of it that frees the slots.
    """

    def __init__(self, mapped: Mapped, stream: CudaStream, theirs: Regions, ours: Regions) -> None:
        """Owns `mapped` and `stream`, which nothing else uses. Regions are `(address, bytes)` in this process."""
        self._mapped: Mapped | None = mapped
        self._stream = stream
        self._theirs, self._ours = (np.array(regions, np.int64).reshape(-1, 2) for regions in (theirs, ours))
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._is_closing = False

    def read(self, lease: str, spans: Spans, deadline: float) -> None:
        require_inside(spans.table[:, [0, 2, 3]], self._ours[:, 1], "target")
        with self._lock:
            if self._mapped is None:
                raise RemoteReadError(self._failure)
            try:
                self._require_theirs(spans)
                use_device(self._mapped.gpu)
                for batch in spans.batches(most_spans=MOST_SPANS, most_bytes=MOST_BYTES):
                    self._copy(self._mapped, batch, deadline)
            except (RemoteReadError, RuntimeError) as error:  # CuPy raises RuntimeErrors
                self._let_go(f"reading {spans.num_bytes} bytes of a peer's GPU memory failed: {error}")
                raise RemoteReadError(self._failure) from None

    def close(self) -> None:
        self._is_closing = True
        with self._lock:
            self._let_go("the connection was closed")

    def _let_go(self, reason: str) -> None:
        if self._mapped is not None:
            mapped, self._mapped, self._failure = self._mapped, None, reason
            mapped.close()

    def _require_theirs(self, spans: Spans) -> None:
        try:
            require_inside(spans.table[:, [0, 1, 3]], self._theirs[:, 1], "source")
        except CacheStateError as error:
            raise RemoteReadError(str(error)) from None

    def _copy(self, mapped: Mapped, batch: Spans, deadline: float) -> None:
        self._require_wanted(mapped, deadline)
        self._stream.begin()
        self._stream.enqueue(mapped.memory.copy, self._ranges(batch), _path())
        try:
            end = self._stream.record_event()
            while not end.wait_done(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
                self._require_wanted(mapped, deadline)
        except BaseException:
            self._stream.synchronize()  # whoever gets the slots next, gets them for good
            raise
        if end.error is not None:
            raise RemoteReadError(str(end.error))
        # What is left of a peer that died meanwhile is nobody's. Its lease, too, is confirmed no more.
        self._require_owner(mapped)

    def _require_wanted(self, mapped: Mapped, deadline: float) -> None:
        if self._is_closing:
            raise RemoteReadError("the connection was closed")
        self._require_owner(mapped)
        if time.monotonic() >= deadline:
            raise RemoteReadError("the copy did not end in time")

    def _require_owner(self, mapped: Mapped) -> None:
        if not mapped.owner_is_alive():
            raise RemoteReadError("the peer's process has ended")

    def _ranges(self, batch: Spans) -> npt.NDArray[np.int64]:
        regions, there, here, counts = batch.table.T
        ranges = np.empty((len(batch), 3), np.int64)
        ranges[:, 0] = self._theirs[regions, 0] + there
        ranges[:, 1] = self._ours[regions, 0] + here
        ranges[:, 2] = counts
        return ranges


def _path() -> Path:
    """The batch call is known to hang on some drivers: it is used where this process has tried it."""
    landing = ops.landed()
    return Path.AUTO if landing is not None and Path.BATCH.name.lower() in landing.live else Path.RUNS
