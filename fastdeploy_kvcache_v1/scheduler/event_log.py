"""EventLog: a bounded queue of cache changes for outside indexes, such as cache-aware routers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..contract.messages import BlockHash, CacheEvent, CacheLevel
from .run import Run


class EventLog:
    """Keeps events from the first `take` on. When they name more than `limit` blocks, all are dropped until the next
    `take`. While no events are kept, they cost neither memory nor time.
    """

    def __init__(self, limit: int) -> None:
        self.overflows = 0
        """Number of times that events named more than `limit` blocks."""
        self._is_listening = False
        self._limit = limit
        self._events: list[CacheEvent] = []
        self._num_blocks = 0

    def stored(self, level: CacheLevel, run: Run, added: Sequence[BlockHash] = ()) -> None:
        """Record that the blocks of `run`, or the ones about to be `added` to it, are in tier `level`."""
        if self._is_listening and self._has_room(len(added) or run.length):
            hashes, parent = (added, run.last_hash) if added else (run.hashes, run.parent_hash)
            self._events.append(CacheEvent("stored", level, tuple(hashes), parent))

    def removed(self, level: CacheLevel, run: Run, last: int = 0) -> None:
        """Record that `run`, or its `last` blocks, left tier `level`. An open copy to the tier was never reported."""
        if self._is_listening and run.open is not level and self._has_room(last or run.length):
            self._events.append(CacheEvent("removed", level, tuple(run.hashes[-last:])))

    def cleared(self) -> None:
        if self._is_listening:
            self._events, self._num_blocks = [CacheEvent("cleared", None)], 0

    def take(self, runs: Iterable[Run]) -> list[CacheEvent]:
        """Return all events since the last call, oldest first. The first time and after an overflow they are `cleared`
        and the content of both tiers, taken from `runs`, the whole cache. With a limit of 0 there are no events.
        """
        complete, self._is_listening = self._is_listening or not self._limit, bool(self._limit)
        events, self._events, self._num_blocks = self._events, [], 0
        if complete:
            return events
        events = [CacheEvent("cleared", None)]
        for run in runs:
            for level, is_there in ((CacheLevel.DEVICE, run.on_device), (CacheLevel.HOST, run.host is not None)):
                if is_there and run.open is not level:
                    events.append(CacheEvent("stored", level, tuple(run.hashes), run.parent_hash))
        return events

    def _has_room(self, num_blocks: int) -> bool:
        self._num_blocks += num_blocks
        if self._num_blocks <= self._limit:
            return True
        self._events = []
        self._is_listening = False
        self.overflows += 1
        return False
