"""Pools of slots: which blocks of a tier are free.

A pool only knows free and allocated; the prefix tree and the requests own what is allocated. Last freed, first
reused, whole runs at a time, so that neighbouring slots tend to stay together (copies coalesce them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Generic, TypeVar

from ..errors import BlockPoolError
from ..metadata import DeviceSlot, HostSlot
from .invariants import expect

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
        try:  # in one pass: to check all of them first takes nearly twice as long
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
        free, allocated = set(self._free), self.allocated_slots()
        expect(len(free) == len(self._free), f"{self.level} pool: a slot is on the free list twice")
        expect(not free & allocated, f"{self.level} pool: slots both free and allocated: {sorted(free & allocated)}")
        is_whole = free | allocated == set(range(self._size)) and len(self._owned) == self._size
        expect(is_whole, f"{self.level} pool: slots lost or out of range 0..{self._size - 1}")

    def check_owners(self, slots: Sequence[Slot]) -> None:
        """`check`, and raises `InvariantError` unless `slots`, which all owners hold, are the allocated ones."""
        self.check()
        expect(len(slots) == len(set(slots)), f"{self.level} pool: a slot has two owners")
        expect(self.allocated_slots().issuperset(slots), f"{self.level} pool: a slot is used that is free")
        num_leaked = self.num_allocated - len(slots)
        expect(not num_leaked, f"{self.level} pool: {num_leaked} slots leaked")


class DeviceBlockPool(BlockPool[DeviceSlot]):
    """Slots of the device caches. The only pool whose size changes while the server runs."""

    level = "device"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._readers: dict[int, int] = {}
        """How many readers from outside hold a slot, for each that is held."""
        self._ownerless: set[int] = set()
        """Held slots that their owner has given back: they become free with their last reader."""

    @property
    def num_held(self) -> int:
        """Slots with an owner that would not be free if the owner gave them back now."""
        return len(self._readers) - len(self._ownerless)

    @property
    def num_ownerless(self) -> int:
        """Allocated slots that only wait for their readers."""
        return len(self._ownerless)

    def hold(self, slots: Sequence[DeviceSlot]) -> None:
        """One more reader of each of `slots`, which have an owner: until `let_go` their bytes stay as they are."""
        for slot in slots:
            assert self._owned[slot] and slot not in self._ownerless, "only what has an owner is read"
            self._readers[slot] = self._readers.get(slot, 0) + 1

    def let_go(self, slots: Sequence[DeviceSlot]) -> None:
        """One reader less of each of `slots`."""
        unread = []
        for slot in slots:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                unread.append(slot)
        waited = [slot for slot in unread if slot in self._ownerless]
        self._ownerless.difference_update(waited)
        super().free(waited)

    def held_slots(self) -> frozenset[int]:
        return frozenset(self._readers)

    def free(self, slots: Sequence[DeviceSlot]) -> None:
        """As `BlockPool.free`; a slot that is held is free once its last reader lets go of it."""
        if not self._readers:
            super().free(slots)
            return
        if not self._ownerless.isdisjoint(slots):
            raise BlockPoolError(f"device pool: a freed slot has been given back already: {list(slots)[:8]}")
        super().free(slots)
        held = [slot for slot in slots if slot in self._readers]
        if held:
            del self._free[len(self._free) - len(slots) :]
            self._free.extend(slot for slot in reversed(slots) if slot not in self._readers)
            for slot in held:
                self._owned[slot] = 1
            self._ownerless.update(held)

    def keep_only(self, slots: Iterable[DeviceSlot]) -> None:
        """As `BlockPool.keep_only`; what is held stays allocated as well."""
        owned = set(slots)
        super().keep_only(owned | self._readers.keys())  # type: ignore[arg-type]
        self._ownerless = self._readers.keys() - owned

    def check_owners(self, slots: Sequence[DeviceSlot]) -> None:
        super().check_owners([*slots, *self._ownerless])  # type: ignore[list-item]
        are_read = self._ownerless <= self._readers.keys()
        expect(are_read, "device pool: a slot waits for readers that it does not have")

    def slots_above(self, size: int) -> set[int]:
        """Allocated slots that a shrink to `size` would take away; O(slots above `size`)."""
        return set(compress(range(size, self._size), self._owned[size:]))

    def resize(self, size: int) -> None:
        """Grow or shrink to `size` slots; none above is allocated."""
        if size < self._size:
            assert not self.slots_above(size), "what is in use is not taken away"
            self._free = [slot for slot in self._free if slot < size]
            del self._owned[size:]
        else:
            self._owned.extend(bytes(size - self._size))
            self._free[:0] = range(size - 1, self._size - 1, -1)
        self._size = size


class HostBlockPool(BlockPool[HostSlot]):
    """Slots of the page-locked host pool."""

    level = "host"
