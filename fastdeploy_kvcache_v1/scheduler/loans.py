"""Loads and stores: slots that storage or a peer fills or reads.

A *load* owns slots that it fills with blocks from outside. A *store* holds slots of cached blocks: the blocks may be
forgotten meanwhile, their bytes stay until it ends. See `CacheManager.begin_load`, `begin_store` and
`begin_device_store` for the contracts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..config import KVCacheConfig
from ..contract.messages import BlockHash, CacheLevel, LoadSlots, NoSpace, StoreSource
from ..errors import CacheStateError
from .block_pool import BlockPool
from .cache_stats import Counters
from .invariants import expect
from .radix_tree import RadixTree
from .residency import Residency
from .run import DEVICE, HOST
from .tiering import Tiering


@dataclass(eq=False, slots=True)
class Load:
    level: CacheLevel
    hashes: Sequence[BlockHash]
    """Hashes of a prompt from its first block on."""
    first: int
    """Index of the first block to load."""
    slots: list[Any]
    """Slots of tier `level` for the blocks from `first` on."""
    wanted: bool = True
    """False once the cache was reset: bytes may still arrive, but are not cached."""


class Loads:
    """Loads by id. They own their slots, which are in no block table and not in the tree."""

    def __init__(self, config: KVCacheConfig, tree: RadixTree, tiering: Tiering, counters: Counters) -> None:
        self._caching = config.enable_prefix_caching
        self._tree = tree
        self._tiering = tiering
        self._counters = counters
        self._loads: dict[str, Load] = {}

    def begin(
        self, load_id: str, hashes: Sequence[BlockHash], first: int, level: CacheLevel, most: int | None
    ) -> LoadSlots | NoSpace:
        if load_id in self._loads:
            raise CacheStateError(f"load {load_id} has begun already: complete it first")
        if level is CacheLevel.STORAGE:
            raise CacheStateError(f"load {load_id}: a load fills the device or the host tier, not storage")
        if not 0 <= first < len(hashes):
            raise CacheStateError(f"load {load_id}: no block {first} among {len(hashes)} hashes")
        count = len(hashes) - first if most is None else min(most, len(hashes) - first)
        slots = self._tiering.allocate_up_to(count, level) if self._caching else []
        if not slots:
            self._counters.allocations_refused += 1
            return NoSpace(count, 0)
        self._loads[load_id] = Load(level, hashes, first, slots)
        return LoadSlots(tuple(slots), self._tiering.last_step_with_copies(level))

    def complete(self, load_id: str, num_arrived: int) -> int:
        load = self._get(load_id)
        if not 0 <= num_arrived <= len(load.slots):
            raise CacheStateError(f"load {load_id}: {num_arrived} blocks arrived, it has slots for {len(load.slots)}")
        del self._loads[load_id]
        if load.level is CacheLevel.HOST:
            self._tiering.refilled.update(dict.fromkeys(load.slots[:num_arrived]))
        num_cached = 0
        if load.wanted and num_arrived:
            num_cached = self._tree.graft(load.hashes, load.first + num_arrived, load.slots[:num_arrived], load.level)
        self._counters.loaded_blocks += num_cached
        self._counters.wasted_load_blocks += num_arrived - num_cached
        self._tiering.free(load.slots[: num_arrived - num_cached] + load.slots[num_arrived:], load.level)
        return num_cached

    def cancel_all(self) -> None:
        for load in self._loads.values():
            load.wanted = False

    def _get(self, load_id: str) -> Load:
        try:
            return self._loads[load_id]
        except KeyError:
            raise CacheStateError(f"load {load_id} is unknown, or has been completed already") from None

    def slots(self, level: CacheLevel) -> list[Any]:
        """List the slots of tier `level` that all loads own. O(blocks being loaded)."""
        return [slot for load in self._loads.values() if load.level is level for slot in load.slots]

    def num_slots(self, level: CacheLevel) -> int:
        """O(loads)."""
        return sum(len(load.slots) for load in self._loads.values() if load.level is level)

    def check_none(self) -> None:
        expect(not self._loads, f"manager: loads never completed: {', '.join(list(self._loads)[:8])}")


class Stores:
    """Stores by id. Each holds slots of one tier."""

    def __init__(self, tree: RadixTree, residency: Residency, tiering: Tiering) -> None:
        self._tree = tree
        self._residency = residency
        self._pools: dict[CacheLevel, BlockPool[Any]] = {
            CacheLevel.DEVICE: residency.device_pool,
            CacheLevel.HOST: residency.host_pool,
        }
        self._tiering = tiering
        self._stores: dict[str, tuple[CacheLevel, Sequence[int]]] = {}

    def begin(self, store_id: str, step: int, slots: Set[int]) -> StoreSource:
        self._require_new(store_id)
        wanted = set(slots)
        blocks = [block for copy in self._tiering.told.of(step) or () for block in copy.take(wanted)]
        hashes, held, parents = zip(*blocks, strict=True) if blocks else ((), (), ())
        return self._hold(store_id, CacheLevel.HOST, hashes, held)._replace(parents=parents)

    def begin_prefix(
        self, store_id: str, hashes: Sequence[BlockHash], first: int, most: int | None, level: CacheLevel
    ) -> StoreSource:
        self._require_new(store_id)
        tier = DEVICE if level is CacheLevel.DEVICE else HOST
        end = len(hashes) if most is None else min(len(hashes), first + most)
        slots: list[int] = []
        begin = 0
        for run, count in self._tree.look(hashes, end):
            is_there = run.on_device if level is CacheLevel.DEVICE else run.host is not None
            if (begin + count > first or level is CacheLevel.DEVICE) and (not is_there or run.open is level):
                break
            slots += run.slots(tier, run.start + max(0, first - begin), run.start + count)
            begin += count
        return self._hold(store_id, level, hashes[first : first + len(slots)], slots)

    def _hold(self, store_id: str, level: CacheLevel, hashes: Sequence[BlockHash], slots: Sequence[int]) -> StoreSource:
        if slots:
            self._pools[level].hold(slots)
            self._stores[store_id] = level, slots
        return StoreSource(tuple(hashes), tuple(slots))

    def end(self, store_id: str) -> None:
        if store_id not in self._stores:
            raise CacheStateError(f"store {store_id} is unknown, or has ended already")
        level, slots = self._stores.pop(store_id)
        self._pools[level].release_held(slots)
        if level is CacheLevel.HOST:
            self._residency.host_store_ended()

    def _require_new(self, store_id: str) -> None:
        if store_id in self._stores:
            raise CacheStateError(f"store {store_id} has begun already: end it first")

    def check(self) -> None:
        """Raise `InvariantError` unless exactly the slots of stores are held, each once per store."""
        for level, pool in self._pools.items():
            stores = [slots for tier, slots in self._stores.values() if tier is level]
            expect(all(len(slots) == len(set(slots)) for slots in stores), "manager: a store holds a slot twice")
            pool.check_readers(stores)

    def check_none(self) -> None:
        expect(not self._stores, "manager: stores never ended")
