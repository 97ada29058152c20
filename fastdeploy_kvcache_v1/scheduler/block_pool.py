"""Pools of slots: which blocks of a tier are free.

A pool only knows free and allocated; the prefix tree and the requests own what is allocated. Last freed, first
reused, whole runs at a time, so that neighbouring slots tend to stay together (copies coalesce them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Generic, TypeVar

from ..errors import BlockPoolError, InvariantError, PoolInUseError
from ..metadata import DeviceSlot, HostSlot

Slot = TypeVar("Slot", bound=int)

_INVERTED = bytes([1, 0]) + bytes(254)
"""Table for `translate`: an owned slot is not free."""


class BlockPool(Generic[Slot]):
    """Slots `0 .. size-1`. Cost of a call: O(slots handed over), never O(size). Not thread-safe."""

    level = "block"

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[int] = list(range(size - 1, -1, -1))
        self._owned = bytearray(size)
        """1 for each slot that has an owner."""

    @property
    def size(self) -> int:
        return self._size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_allocated(self) -> int:
        return self._size - len(self._free)

    def allocate(self, count: int) -> list[Slot]:
        """`count` slots for the caller to own. Raises `BlockPoolError` when fewer are free: ask `num_free` first."""
        if not 0 <= count <= len(self._free):
            raise BlockPoolError(f"{self.level} pool: {count} slots wanted, {len(self._free)} of {self._size} free")
        start = len(self._free) - count
        slots = self._free[start:]
        del self._free[start:]
        slots.reverse()
        owned = self._owned
        for slot in slots:
            owned[slot] = 1
        return slots  # type: ignore[return-value]

    def free(self, slots: Sequence[Slot]) -> None:
        """Take `slots` back. Raises `BlockPoolError`, freeing none, if one is not allocated or named twice."""
        owned, rest = self._owned, iter(slots)
        try:
            if slots and min(slots) < 0:
                raise IndexError
            for slot in rest:
                if not owned[slot]:
                    raise IndexError
                owned[slot] = 0
        except IndexError:
            done = len(slots) - len(list(rest)) - 1
            for slot in slots[: max(0, done)]:
                owned[slot] = 1
            wrong = "outside the pool, not allocated, or named twice"
            raise BlockPoolError(f"{self.level} pool: a freed slot is {wrong}: {list(slots)[:8]}") from None
        self._free.extend(reversed(slots))

    def keep_only(self, slots: Iterable[Slot]) -> None:
        """Free everything but `slots`. Raises `BlockPoolError`, changing nothing, if one is not allocated. O(size)."""
        kept = bytearray(self._size)
        for slot in slots:
            if not 0 <= slot < self._size or not self._owned[slot]:
                raise BlockPoolError(f"{self.level} pool: slot {slot} cannot be kept, it is not allocated")
            kept[slot] = 1
        self._owned = kept
        self._free = list(compress(range(self._size - 1, -1, -1), kept[::-1].translate(_INVERTED)))

    def allocated_slots(self) -> frozenset[int]:
        """Every slot that has an owner; O(size), for checks."""
        return frozenset(compress(range(self._size), self._owned))

    def check(self) -> None:
        """Raises `InvariantError` unless free and allocated slots partition `0 .. size-1`."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError(f"{self.level} pool: a slot is on the free list twice")
        allocated = self.allocated_slots()
        if free & allocated:
            raise InvariantError(f"{self.level} pool: slots both free and allocated: {sorted(free & allocated)}")
        if free | allocated != set(range(self._size)) or len(self._owned) != self._size:
            raise InvariantError(f"{self.level} pool: slots lost or out of range 0..{self._size - 1}")

    def check_owners(self, slots: Sequence[Slot]) -> None:
        """`check`, and raises `InvariantError` unless `slots`, which all owners hold, are the allocated ones."""
        self.check()
        if len(slots) != len(set(slots)):
            raise InvariantError(f"{self.level} pool: a slot has two owners")
        if not self.allocated_slots().issuperset(slots):
            raise InvariantError(f"{self.level} pool: a slot is used that is free")
        if len(slots) != self.num_allocated:
            raise InvariantError(f"{self.level} pool: {self.num_allocated - len(slots)} slots leaked")


class DeviceBlockPool(BlockPool[DeviceSlot]):
    """Slots of the device caches. The only pool whose size changes while the server runs."""

    level = "device"

    def slots_above(self, size: int) -> set[int]:
        """Allocated slots that a shrink to `size` would take away; O(slots above `size`)."""
        return set(compress(range(size, self._size), self._owned[size:]))

    def resize(self, size: int) -> None:
        """Grow or shrink to `size` slots. Raises `PoolInUseError`, changing nothing, if a slot above is allocated."""
        if size < self._size:
            if in_use := self.slots_above(size):
                raise PoolInUseError(f"cannot shrink the device pool to {size} blocks: {len(in_use)} above are in use")
            self._free = [slot for slot in self._free if slot < size]
            del self._owned[size:]
        else:
            self._owned.extend(bytes(size - self._size))
            self._free[:0] = range(size - 1, self._size - 1, -1)
        self._size = size


class HostBlockPool(BlockPool[HostSlot]):
    """Slots of the page-locked host pool."""

    level = "host"
