"""StoreTable: host blocks that are being read from outside the two tiers, and stay in their slots until that has ended.

The contract of a store stands on `CacheManager.begin_store`. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from ..errors import CacheStateError
from ..metadata import BlockHash, HostSlot, StoreSource
from .radix_tree import RadixTree
from .residency import Residency
from .run import Run
from .tiering import Tiering


@dataclass(eq=False, slots=True)
class Store:
    runs: list[Run]
    """Which have the slots that are read, each pinned with its path."""
    is_forgotten: bool = False
    """After a forced reset: `runs` are all that is pinned."""

    def pinned(self) -> Iterator[list[Run]]:
        """One path for every pin; O(its runs)."""
        return iter([self.runs]) if self.is_forgotten else (run.path() for run in self.runs)


class StoreTable:
    """Stores by their id. Each pins the paths to the runs that it reads, as a request does."""

    def __init__(self, tree: RadixTree, residency: Residency, tiering: Tiering) -> None:
        self._tree = tree
        self._residency = residency
        self._tiering = tiering
        self._stores: dict[str, Store] = {}

    def begin(self, store_id: str, step: int, slots: Set[int]) -> StoreSource:
        if store_id in self._stores:
            raise CacheStateError(f"store {store_id} has begun already: end it first")
        blocks: list[tuple[BlockHash, HostSlot]] = []
        store = Store([])
        for run in self._tiering.copied_to_host(step):
            found = [(block, slot) for block, slot in zip(run.hashes, run.host_slots, strict=True) if slot in slots]
            if found:
                blocks += found
                store.runs.append(run)
        if store.runs:
            for run in store.runs:
                self._tree.pin(run)
            self._stores[store_id] = store
        return StoreSource(tuple(block for block, _ in blocks), tuple(slot for _, slot in blocks))

    def end(self, store_id: str) -> None:
        store = self._stores.pop(store_id, None)
        if store is None:
            raise CacheStateError(f"store {store_id} is unknown, or has ended already")
        for run in store.runs:
            if store.is_forgotten:
                self._residency.unpin(run)
            else:
                self._tree.release(run, touch=False)

    def keep_host_slots(self) -> None:
        """After a forced reset: of the forgotten blocks only the host slots, which are read, stay in use."""
        for store in self._stores.values():
            pinned = [run for path in store.pinned() for run in reversed(path)]
            store.runs, store.is_forgotten = [run for run in pinned if run.host is not None], True
            for run in pinned:
                if run.host is None:
                    self._residency.unpin(run)
                else:
                    self._residency.forget_device(run)

    def __len__(self) -> int:
        return len(self._stores)

    def pinned_paths(self) -> Iterator[list[Run]]:
        """One path for every pin; O(their runs)."""
        return (path for store in self._stores.values() for path in store.pinned())
