"""Pools of slots: who may use which block of a tier.

A pool only knows free and allocated; the prefix tree and the requests own what is allocated. Last freed, first
reused, whole runs at a time, so that neighbouring slots tend to stay together (copies coalesce them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from .errors import BlockPoolError, InvariantError, PoolInUseError
from .metadata import DeviceSlot, HostSlot

Slot = TypeVar("Slot", bound=int)


class BlockPool(Generic[Slot]):
    """Slots `0 .. size-1`. Cost of a call: O(slots handed over), never O(size). Not thread-safe."""

    level = "block"

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[int] = list(range(size - 1, -1, -1))
        self._allocated: set[int] = set()

    @property
    def size(self) -> int:
        return self._size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_allocated(self) -> int:
        return len(self._allocated)

    def allocate(self, count: int) -> list[Slot]:
        """`count` slots for the caller to own. Raises `BlockPoolError` when fewer are free: ask `num_free` first."""
        if not 0 <= count <= len(self._free):
            raise BlockPoolError(f"{self.level} pool: {count} slots wanted, {len(self._free)} of {self._size} free")
        start = len(self._free) - count
        slots = self._free[start:]
        del self._free[start:]
        slots.reverse()
        self._allocated.update(slots)
        return slots  # type: ignore[return-value]

    def free(self, slots: Sequence[Slot]) -> None:
        """Take `slots` back. Raises `BlockPoolError`, freeing none, if one is not allocated or named twice."""
        before = len(self._allocated)
        unique = set(slots)
        if len(unique) != len(slots) or not unique <= self._allocated:
            wrong = sorted(unique - self._allocated) or "a slot named twice"
            raise BlockPoolError(f"{self.level} pool: freed slots that are not allocated: {wrong}")
        self._allocated -= unique
        assert before - len(self._allocated) == len(slots)
        self._free.extend(reversed(slots))

    def allocated_slots(self) -> frozenset[int]:
        """Every slot somebody owns; O(allocated), for checks."""
        return frozenset(self._allocated)

    def check(self) -> None:
        """Raises `InvariantError` unless free and allocated slots partition `0 .. size-1`."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError(f"{self.level} pool: a slot is on the free list twice")
        if free & self._allocated:
            raise InvariantError(f"{self.level} pool: slots both free and allocated: {sorted(free & self._allocated)}")
        if free | self._allocated != set(range(self._size)):
            raise InvariantError(f"{self.level} pool: slots lost or out of range 0..{self._size - 1}")


class DeviceBlockPool(BlockPool[DeviceSlot]):
    """Slots of the device caches. The only pool whose size changes while the server runs."""

    level = "device"

    def slots_above(self, size: int) -> set[int]:
        """Allocated slots that a shrink to `size` would take away; O(slots above `size`)."""
        return self._allocated.intersection(range(size, self._size))

    def resize(self, size: int) -> None:
        """Grow or shrink to `size` slots. Raises `PoolInUseError`, changing nothing, if a slot above is allocated."""
        if size < self._size:
            if in_use := self.slots_above(size):
                raise PoolInUseError(f"cannot shrink the device pool to {size} blocks: {len(in_use)} above are in use")
            self._free = [slot for slot in self._free if slot < size]
        else:
            self._free[:0] = range(size - 1, self._size - 1, -1)
        self._size = size


class HostBlockPool(BlockPool[HostSlot]):
    """Slots of the page-locked host pool."""

    level = "host"
