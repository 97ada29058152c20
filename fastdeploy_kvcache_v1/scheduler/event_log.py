"""Bounded queue of cache changes for outside indexes (cache-aware routers)."""

from __future__ import annotations

from collections.abc import Sequence

from ..metadata import BlockHash, CacheEvent, CacheLevel


class EventLog:
    """Keeps events that name at most `limit` blocks; one more and all are dropped, until the next `take`.

    Not thread-safe: the manager's lock covers it.
    """

    def __init__(self, limit: int) -> None:
        self.overflows = 0
        """How often that happened."""
        self._limit = limit
        self._events: list[CacheEvent] = []
        self._num_blocks = 0
        self._lost = False

    @property
    def is_listening(self) -> bool:
        """Would an event be kept now? If not, nobody need make it."""
        return bool(self._limit) and not self._lost

    def stored(self, level: CacheLevel, hashes: Sequence[BlockHash], parent: BlockHash | None) -> None:
        if self._has_room(len(hashes)):
            self._events.append(CacheEvent("stored", level, tuple(hashes), parent))

    def removed(self, level: CacheLevel, hashes: Sequence[BlockHash]) -> None:
        if self._has_room(len(hashes)):
            self._events.append(CacheEvent("removed", level, tuple(hashes)))

    def cleared(self) -> None:
        """Everything before this is void."""
        self._lost, self._num_blocks = False, 0
        self._events = [CacheEvent("cleared", None)] if self._limit else []

    def take(self) -> list[CacheEvent] | None:
        """All events since the last call, oldest first; None when some were lost and the reader needs a snapshot."""
        lost, self._lost = self._lost, False
        events, self._events, self._num_blocks = self._events, [], 0
        return None if lost else events

    def _has_room(self, num_blocks: int) -> bool:
        if not self.is_listening:
            return False
        self._num_blocks += num_blocks
        if self._num_blocks <= self._limit:
            return True
        self._events = []
        self._lost = True
        self.overflows += 1
        return False
