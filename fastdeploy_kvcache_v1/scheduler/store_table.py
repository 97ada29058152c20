"""StoreTable: host blocks that are being read from outside the two tiers, and stay in their slots until that has ended.

The contract of a store stands on `CacheManager.begin_store`. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Set

from ..errors import CacheStateError
from ..metadata import BlockHash, HostSlot, StoreSource
from .residency import Residency
from .run import HostReader
from .tiering import Tiering


class StoreTable:
    """Stores by their id. Each is a reader of the host copies that have its slots, and of nothing else."""

    def __init__(self, residency: Residency, tiering: Tiering) -> None:
        self._residency = residency
        self._tiering = tiering
        self._stores: dict[str, HostReader] = {}

    def begin(self, store_id: str, step: int, slots: Set[int]) -> StoreSource:
        if store_id in self._stores:
            raise CacheStateError(f"store {store_id} has begun already: end it first")
        blocks: list[tuple[BlockHash, HostSlot]] = []
        reader = HostReader()
        for run in self._tiering.copied_to_host(step):
            found = [(block, slot) for block, slot in zip(run.hashes, run.host_slots, strict=True) if slot in slots]
            if found:
                blocks += found
                self._residency.begin_reading(run, reader)
        if blocks:
            self._stores[store_id] = reader
        return StoreSource(tuple(block for block, _ in blocks), tuple(slot for _, slot in blocks))

    def end(self, store_id: str) -> None:
        reader = self._stores.pop(store_id, None)
        if reader is None:
            raise CacheStateError(f"store {store_id} is unknown, or has ended already")
        self._residency.end_reading(reader)

    def __len__(self) -> int:
        return len(self._stores)
