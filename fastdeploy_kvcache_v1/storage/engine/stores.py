"""Stores: sends blocks to the store once they have reached the host tier."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from ...contract.messages import BlockHash
from ...scheduler.cache_manager import CacheManager
from ..messages import CommitDone, StoreBlocks, StoreDone
from .breaker import Breaker, of_rank
from .counters import StorageCounters
from .known_blocks import KnownBlocks
from .link import Link
from .open_copies import OpenCopies
from .store_side import StoreSide

__all__ = ["Stores"]

MOST_WAITING = 4096
"""Pieces. Beyond that the oldest is given up: its blocks are the first to leave the host anyway."""


class Stores(StoreSide):
    """One thread uses it. Nothing in here blocks: a store is answered later, by `store_done`."""

    piece_blocks = 32
    """Stored as one. Until then nobody else gets their slots, so it is not much."""
    pieces_under_way = 2

    def __init__(
        self,
        manager: CacheManager,
        link: Link,
        copies: OpenCopies,
        counters: StorageCounters,
        clock: Callable[[], float],
        known: KnownBlocks,
    ) -> None:
        self._manager = manager
        self._link = link
        self._copies = copies
        self._breaker = Breaker(clock)
        self._counters = counters
        self._known = known
        self._waiting: deque[tuple[int, frozenset[int]]] = deque()
        """Step and host slots that it filled."""
        self._under_way: dict[str, _Store] = {}
        self._committing: dict[str, _Store] = {}
        """All ranks have stored their parts, and no slot is kept."""
        self._numbers = itertools.count()

    def filled(self, step: int, slots: Sequence[int]) -> None:
        """`step` has filled these host slots, on every rank; in the order of their blocks."""
        for start in range(0, len(slots), self.piece_blocks):
            piece = frozenset(slots[start : start + self.piece_blocks])
            if len(self._waiting) == MOST_WAITING:
                self._counters.skipped_store_blocks += len(self._waiting.popleft()[1])
            self._waiting.append((step, piece))

    def go_on(self) -> None:
        """Begin what can begin now: call it after answers and reports."""
        while self._waiting and len(self._under_way) < self.pieces_under_way:
            step, slots = self._waiting.popleft()
            store_id = f"store-{next(self._numbers)}"
            if not self._breaker.may_pass():
                self._counters.skipped_store_blocks += len(slots)
                continue
            source = self._manager.begin_store(store_id, step, self._copies.still_filled(step, slots))
            self._counters.skipped_store_blocks += len(slots) - len(source.slots)
            if source.slots:
                self._under_way[store_id] = _Store(source.hashes, self._link.num_ranks)
                self._link.send(StoreBlocks(store_id, source.hashes, source.slots))

    def cache_reset(self) -> None:
        """What is under way ends where it began, and the marker would be written where blocks are stored then."""
        for store in self._under_way.values():
            store.is_wanted = False
        self._committing.clear()

    def store_done(self, answer: StoreDone) -> None:
        self._counters.store.add(answer, answer.num_written)
        store = self._under_way[answer.store_id]
        store.error = store.error or of_rank(answer)
        if answer.num_refused:
            self._counters.refused_store_blocks += answer.num_refused
            store.is_wanted = False
        store.num_ranks_left -= 1
        if store.num_ranks_left:
            return
        del self._under_way[answer.store_id]
        self._manager.end_store(answer.store_id)
        if self._link.num_ranks > 1 and store.error is None and store.is_wanted:
            self._committing[answer.store_id] = store
            self._link.commit(answer.store_id, store.hashes)
        else:
            self._ended(store)

    def commit_done(self, answer: CommitDone) -> None:
        store = self._committing.pop(answer.store_id, None)
        if store is not None:
            store.error = answer.error
            self._ended(store)

    def _ended(self, store: _Store) -> None:
        self._breaker.answered(store.error)
        if store.error is None and store.is_wanted:
            self._known.add(store.hashes)

    @property
    def is_left_alone(self) -> bool:
        """Nothing is stored for a while."""
        return self._breaker.is_open

    @property
    def is_idle(self) -> bool:
        """No block is kept for being stored."""
        return not self._under_way


class _Store:
    __slots__ = ("error", "hashes", "is_wanted", "num_ranks_left")

    def __init__(self, hashes: tuple[BlockHash, ...], num_ranks: int) -> None:
        self.hashes = hashes
        self.num_ranks_left = num_ranks
        self.error: str | None = None
        """Of the first rank that failed, or of the commit."""
        self.is_wanted = True
        """Not once a rank has refused a value, or the cache was reset."""
