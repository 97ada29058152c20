"""Stores: sends blocks to the store once they have reached the host tier."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...contract.messages import BlockHash
from ...scheduler.cache_manager import CacheManager
from ..messages import StoreDone
from .breaker import Breaker
from .counters import StorageCounters
from .known_blocks import KnownBlocks
from .open_copies import OpenCopies
from .store_link import StoreLink
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
        link: StoreLink,
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
        self._waiting: deque[_Filled | _Prefix] = deque()
        self._under_way: dict[str, _Store] = {}
        self._numbers = itertools.count()

    def filled(self, step: int, slots: Sequence[int]) -> None:
        """`step` has filled these host slots, on every rank; in the order of their blocks."""
        for start in range(0, len(slots), self.piece_blocks):
            self._wait(_Filled(step, frozenset(slots[start : start + self.piece_blocks])))

    def in_use(self, hashes: Sequence[BlockHash], num_stored: int) -> None:
        """What is missing in the store is stored from the host: when it got there, the store failed, or had no room."""
        self._known.add(hashes[:num_stored])
        self._known.deleted(hashes[num_stored:])
        if num_stored < len(hashes):
            self._wait(_Prefix(hashes, num_stored))

    def _wait(self, piece: _Filled | _Prefix) -> None:
        if len(self._waiting) == MOST_WAITING:
            self._counters.skipped_store_blocks += self._waiting.popleft().num_blocks
        self._waiting.append(piece)

    def go_on(self) -> None:
        """Begin what can begin now: call it after answers and reports."""
        while (
            self._waiting
            and self._link.is_serving
            and len(self._under_way) < self.pieces_under_way
            and not self._is_tried
        ):
            piece, store_id = self._waiting.popleft(), f"store-{next(self._numbers)}"
            if isinstance(piece, _Filled):
                blocks = self._begin_filled(store_id, piece)
            else:
                blocks = self._begin_prefix(store_id, piece)
            if not blocks:
                continue
            hashes, slots = zip(*blocks, strict=True)
            if self._breaker.may_pass():
                self._under_way[store_id] = _Store(hashes)
                self._link.store(store_id, hashes, slots)
            else:
                self._manager.end_store(store_id)
                self._counters.skipped_store_blocks += len(blocks)
                self._known.add(hashes, are_stored=False)

    def _begin_filled(self, store_id: str, piece: _Filled) -> list[tuple[BlockHash, int]]:
        """Begin a store of the blocks that are still there. Without any, none has begun.

        A block behind one that is not stored could not be found: it is stored once the prompt is hit, see `in_use`.
        """
        source = self._manager.begin_store(store_id, piece.step, self._copies.still_filled(*piece))
        blocks: dict[BlockHash, int] = {}
        for block, slot, parent in zip(*source, strict=True):
            if parent is None or parent in blocks or self._is_under_way(parent) or not self._known.lacks(parent):
                blocks[block] = slot
            else:
                self._known.add([block], are_stored=False)
        self._counters.skipped_store_blocks += piece.num_blocks - len(blocks)
        if source.slots and not blocks:
            self._manager.end_store(store_id)
        return list(blocks.items())

    def _begin_prefix(self, store_id: str, piece: _Prefix) -> list[tuple[BlockHash, int]]:
        """As `_begin_filled`, of a prompt's next blocks that are missing in the store and are on the host."""
        hashes, begin = piece
        while begin < len(hashes) and (hashes[begin] in self._known or self._is_under_way(hashes[begin])):
            begin += 1
        source = self._manager.begin_host_store(store_id, hashes, begin, most=self.piece_blocks)
        blocks = list(zip(source.hashes, source.slots, strict=True))
        blocks = list(itertools.takewhile(lambda block: self._copies.is_filled(block[1]), blocks))
        if source.slots and not blocks:
            self._manager.end_store(store_id)
        elif blocks:
            self._waiting.appendleft(_Prefix(hashes, begin + len(blocks)))
        return blocks

    @property
    def _is_tried(self) -> bool:
        """The store was left alone, and what waits will be told whether it works again."""
        return self._breaker.is_open and bool(self._under_way)

    def _is_under_way(self, block: BlockHash) -> bool:
        return any(block in store.hashes for store in self._under_way.values())

    def cache_reset(self) -> None:
        """What is under way ends in the namespace in which it began."""
        for store in self._under_way.values():
            store.is_wanted = False

    def store_done(self, answer: StoreDone) -> None:
        self._counters.store.add(answer, answer.num_written)
        self._counters.refused_store_blocks += answer.num_refused
        store = self._under_way.pop(answer.store_id)
        self._manager.end_store(answer.store_id)
        if store.is_wanted:
            self._breaker.answered(answer.error)
            self._known.add(store.hashes, are_stored=answer.error is None and not answer.num_refused)

    @property
    def is_left_alone(self) -> bool:
        """Nothing is stored for a while."""
        return self._breaker.is_open

    @property
    def is_idle(self) -> bool:
        """No block is kept for being stored."""
        return not self._under_way


class _Filled(NamedTuple):
    """Host slots that a step filled."""

    step: int
    slots: frozenset[int]

    @property
    def num_blocks(self) -> int:
        return len(self.slots)


class _Prefix(NamedTuple):
    """Blocks of a prompt from `begin` on."""

    hashes: Sequence[BlockHash]
    begin: int

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) - self.begin


@dataclass(eq=False, slots=True)
class _Store:
    hashes: tuple[BlockHash, ...]
    is_wanted: bool = True
    """Not once the cache was reset."""
