"""CudaIpcSource: one peer's tensors, mapped into this process, copied by this process's GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from ..errors import KVCacheError, RemoteReadError
from ..worker.cuda import trial
from ..worker.cuda.rates import BATCH
from ..worker.cuda.runtime import CudaStream, use_device
from .one_sided import OneSidedSource, Ranges, Region
from .peer_memory import PeerMemory
from .presence import Visit

__all__ = ["CudaIpcSource", "Mapped"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
"""Between two looks whether the read is still wanted; the event is looked at more often."""


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


class CudaIpcSource(OneSidedSource):
    """Copies run on a stream of their own. While a batch runs, deadline and `close` are looked at, too; it is waited
    for all the same: the end of it frees the slots.
    """

    most_spans = 1 << 14
    most_bytes = 64 << 20
    """What was submitted cannot be called back, and a GPU moves so much in milliseconds."""

    def __init__(self, mapped: Mapped, stream: CudaStream, theirs: Sequence[Region], ours: Sequence[Region]) -> None:
        """Owns `mapped` and `stream`, which nothing else uses. Addresses are of this process."""
        super().__init__("a peer's GPU memory", theirs, ours)
        self._mapped = mapped
        self._stream = stream

    def _copy(self, ranges: Ranges, deadline: float) -> None:
        self._stream.begin()
        by_batch = BATCH in trial.known().paths  # known to hang on some drivers
        self._stream.submit(partial(self._mapped.memory.copy, self._stream, ranges, by_batch=by_batch))
        try:
            end = self._stream.record_event()
            while not end.wait_done(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
                self._require_wanted(deadline)
        except BaseException:
            self._stream.synchronize()  # whoever gets the slots next, gets them for good
            raise
        if end.error is not None:
            raise RemoteReadError(str(end.error))
        # What is left of a peer that died meanwhile is nobody's. Its lease, too, is confirmed no more.
        self._require_owner()

    def _let_go(self) -> None:
        self._mapped.close()

    def _require_wanted(self, deadline: float) -> None:
        self._require_owner()
        super()._require_wanted(deadline)

    def _require_owner(self) -> None:
        if not self._mapped.owner_is_alive():
            raise RemoteReadError("the peer's process has ended")
