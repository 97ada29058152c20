"""LoadTable: blocks that come from outside the two tiers (storage, a peer), from their first byte to their last.

The contract of a load stands on `CacheManager.begin_load`. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import KVCacheConfig
from ..errors import CacheStateError
from ..metadata import BlockHash, CacheLevel, LoadSlots, NoSpace
from .cache_stats import Counters
from .invariants import expect
from .radix_tree import RadixTree
from .tiering import Tiering


@dataclass(eq=False, slots=True)
class Load:
    level: CacheLevel
    hashes: Sequence[BlockHash]
    """Of a prompt, from its first block on."""
    end: int
    """The block behind the last one that is loaded."""
    slots: list[Any]
    """Of tier `level`, for the last blocks of `hashes`."""
    wanted: bool = True
    """False in quarantine: what arrives is not cached, but may still arrive."""


class LoadTable:
    """Loads by their id. It owns their slots, which are in no block table and not in the tree."""

    def __init__(self, config: KVCacheConfig, tree: RadixTree, tiering: Tiering, counters: Counters) -> None:
        self._caching = config.enable_prefix_caching
        self._tree = tree
        self._tiering = tiering
        self._counters = counters
        self._loads: dict[str, Load] = {}

    def begin(
        self, load_id: str, hashes: Sequence[BlockHash], first: int, level: CacheLevel, open_step: int, most: int | None
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
        self._loads[load_id] = Load(level, hashes, first + len(slots), slots)
        return LoadSlots(tuple(slots), self._tiering.last_step_with_copies(level, open_step))

    def complete(self, load_id: str, num_arrived: int) -> int:
        load = self._get(load_id)
        if not 0 <= num_arrived <= len(load.slots):
            raise CacheStateError(f"load {load_id}: {num_arrived} blocks arrived, it has slots for {len(load.slots)}")
        del self._loads[load_id]
        num_cached = self._cache(load, num_arrived) if load.wanted and num_arrived else 0
        self._counters.loaded_blocks += num_cached
        self._counters.wasted_load_blocks += num_arrived - num_cached
        self._tiering.free(load.slots[: num_arrived - num_cached] + load.slots[num_arrived:], load.level)
        return num_cached

    def cancel(self, load_id: str) -> None:
        self._get(load_id).wanted = False

    def cancel_all(self) -> None:
        for load in self._loads.values():
            load.wanted = False

    def _get(self, load_id: str) -> Load:
        try:
            return self._loads[load_id]
        except KeyError:
            raise CacheStateError(f"load {load_id} is unknown, or has been completed already") from None

    def _cache(self, load: Load, num_arrived: int) -> int:
        end = load.end - (len(load.slots) - num_arrived)
        return self._tree.graft(load.hashes, end, load.slots[:num_arrived], load.level)

    # ---- looking

    def slots(self, level: CacheLevel) -> list[Any]:
        """Every slot of tier `level` that bytes may arrive in. O(blocks being loaded)."""
        return [slot for load in self._loads.values() if load.level is level for slot in load.slots]

    def num_slots(self, level: CacheLevel) -> int:
        """How many these are. O(loads)."""
        return sum(len(load.slots) for load in self._loads.values() if load.level is level)

    @property
    def num_quarantined(self) -> int:
        """Slots of both tiers whose load is not wanted any more. O(loads)."""
        return sum(len(load.slots) for load in self._loads.values() if not load.wanted)

    def check_none(self) -> None:
        expect(not self._loads, f"manager: loads never completed: {', '.join(list(self._loads)[:8])}")
