"""StoreTable: blocks that are being read from outside the two tiers, whose slots stay as they are until that has ended.

The contract of a store stands on `CacheManager.begin_store` and `begin_device_store`. Not thread-safe: the manager's
lock covers it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from ..errors import CacheStateError
from ..metadata import BlockHash, DeviceSlot, HostSlot, StoreSource
from .places import HostReader
from .radix_tree import RadixTree
from .residency import Residency
from .run import Run
from .tiering import Tiering

LOOKED_AT_ONCE = 64
"""Blocks of a run."""


class StoreTable:
    """Stores by their id. Each is a reader of slots of one tier, and of nothing else."""

    def __init__(self, tree: RadixTree, residency: Residency, tiering: Tiering) -> None:
        self._tree = tree
        self._residency = residency
        self._tiering = tiering
        self._stores: dict[str, HostReader | Sequence[DeviceSlot]] = {}

    def begin(self, store_id: str, step: int, slots: Set[int]) -> StoreSource:
        self._require_new(store_id)
        blocks: list[tuple[BlockHash, HostSlot]] = []
        reader = HostReader()
        for run in self._tiering.copied_to_host(step):
            if len(blocks) == len(slots):
                break
            places = _places(run, slots, len(slots) - len(blocks))
            if places:
                read = self._part(run, places[0], places[-1] + 1)
                all_blocks = zip(read.hashes, read.host_slots, strict=True)
                blocks += [block for block in all_blocks if block[1] in slots]
                self._residency.begin_reading(read, reader)
        if blocks:
            self._stores[store_id] = reader
        return StoreSource(tuple(block for block, _ in blocks), tuple(slot for _, slot in blocks))

    def begin_on_device(self, store_id: str, hashes: Sequence[BlockHash], first: int, most: int | None) -> StoreSource:
        self._require_new(store_id)
        end = len(hashes) if most is None else min(len(hashes), first + most)
        slots = self._tree.filled_device_slots(hashes, first, end)
        if slots:
            self._residency.device_pool.hold(slots)
            self._stores[store_id] = slots
        return StoreSource(tuple(hashes[first : first + len(slots)]), tuple(slots))

    def end(self, store_id: str) -> None:
        reader = self._stores.pop(store_id, None)
        if reader is None:
            raise CacheStateError(f"store {store_id} is unknown, or has ended already")
        if isinstance(reader, HostReader):
            self._residency.end_reading(reader)
        else:
            self._residency.device_pool.let_go(reader)

    def _require_new(self, store_id: str) -> None:
        if store_id in self._stores:
            raise CacheStateError(f"store {store_id} has begun already: end it first")

    def _part(self, run: Run, first: int, end: int) -> Run:
        """Blocks `[first, end)` of `run` as a run of their own: the others may leave."""
        if end < run.length:
            run = self._tree.split(run, end)
        if first:
            self._tree.split(run, first)
        return run

    def __len__(self) -> int:
        return len(self._stores)


def _places(run: Run, slots: Set[int], most: int) -> list[int]:
    """Which blocks of `run` are in host `slots`; `most` of them are enough.

    Its first blocks are looked at first. The pieces of a run are stored in order, and what was stored is a run of its
    own: so the next piece is mostly at the beginning, however long the run is.
    """
    places: list[int] = []
    for begin in range(0, run.length, LOOKED_AT_ONCE):
        some = run.host_slots_of(begin, min(begin + LOOKED_AT_ONCE, run.length))
        places += [begin + number for number, slot in enumerate(some) if slot in slots]
        if len(places) >= most:
            break
    return places
