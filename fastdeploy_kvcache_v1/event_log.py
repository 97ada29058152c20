"""Bounded queue of cache changes for outside indexes (cache-aware routers)."""

from __future__ import annotations

from collections.abc import Sequence

from .metadata import BlockHash, CacheEvent, CacheLevel


class EventLog:
    """Keeps at most `limit` events; one more and all are dropped, counted in `overflows`, until the next `take`.

    Not thread-safe: the manager's lock covers it.
    """

    def __init__(self, limit: int) -> None:
        self.overflows = 0
        self._limit = limit
        self._events: list[CacheEvent] = []
        self._lost = False

    def stored(self, level: CacheLevel, hashes: Sequence[BlockHash], parent: BlockHash | None) -> None:
        if self._has_room():
            self._events.append(CacheEvent("stored", level, tuple(hashes), parent))

    def removed(self, level: CacheLevel, hashes: Sequence[BlockHash]) -> None:
        if self._has_room():
            self._events.append(CacheEvent("removed", level, tuple(hashes)))

    def cleared(self) -> None:
        """Everything before this is void."""
        self._lost = False
        self._events = [CacheEvent("cleared", None)] if self._limit else []

    def take(self) -> list[CacheEvent] | None:
        """All events since the last call, oldest first; None when some were lost and the reader needs a snapshot."""
        lost, self._lost = self._lost, False
        events, self._events = self._events, []
        return None if lost else events

    def _has_room(self) -> bool:
        if not self._limit or self._lost:
            return False
        if len(self._events) < self._limit:
            return True
        self._events = []
        self._lost = True
        self.overflows += 1
        return False
