"""BlockPool: which slots of a tier are free, owned, and held by readers.

The prefix tree, requests and loads own slots. Slots freed last are reused first, whole runs at a time, so that
neighbours tend to stay together and their copies coalesce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar, cast

from ..errors import BlockPoolError
from .invariants import expect

Slot = TypeVar("Slot", bound=int)


class BlockPool(Generic[Slot]):
    """Slots `0 .. size-1` of one tier, `tier` in messages. A call costs O(slots passed) unless it says otherwise. Not
    thread-safe.

    What is not free or ownerless is owned. Owners free what they were given, once: a flag for each slot would find
    another slot at once, but took a fifth of the manager's time. `check_owners` finds it later. Who gets slots from
    outside looks first whether they are his.

    A held slot keeps its bytes. When its owner frees it, it is *ownerless*, neither owned nor free, until its last
    reader releases it.
    """

    def __init__(self, tier: str, size: int) -> None:
        self.size = 0
        self._tier = tier
        self._free: list[Slot] = []
        self._readers: dict[Slot, int] = {}
        """Number of readers of each held slot."""
        self._ownerless: set[Slot] = set()
        """Held slots that their owner has freed."""
        self.resize(size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self.size - len(self._free) - len(self._ownerless)

    @property
    def num_held(self) -> int:
        """Number of slots that have an owner and would become ownerless if it freed them."""
        return len(self._readers) - len(self._ownerless)

    def allocate(self, count: int) -> list[Slot]:
        """Give the caller `count` slots. Raises `BlockPoolError` if fewer are free: ask `num_free` first."""
        if not 0 <= count <= len(self._free):
            raise BlockPoolError(f"{self._tier} pool: {count} slots wanted, {len(self._free)} of {self.size} free")
        start = len(self._free) - count
        slots = self._free[start:]
        del self._free[start:]
        slots.reverse()
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Take `slots` back, which were allocated. Raises `BlockPoolError`, freeing none, if so many have no owner."""
        if len(slots) > self.num_owned:
            raise BlockPoolError(f"{self._tier} pool: {len(slots)} slots are freed, {self.num_owned} have an owner")
        unread = slots
        if self._readers:
            unread = [slot for slot in slots if slot not in self._readers]
            self._ownerless.update(slot for slot in slots if slot in self._readers)
        self._free.extend(reversed(unread))

    def hold(self, slots: Sequence[Slot]) -> None:
        """Add a reader to each of `slots`, which have an owner. Their bytes stay until `release_held`."""
        for slot in slots:
            assert slot not in self._ownerless, "only a slot that has an owner can be held"
            self._readers[slot] = self._readers.get(slot, 0) + 1

    def release_held(self, slots: Sequence[Slot]) -> None:
        for slot in reversed(slots):
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if slot in self._ownerless:
                    self._ownerless.remove(slot)
                    self._free.append(slot)

    def is_held(self, slot: Slot) -> bool:
        return slot in self._readers

    def held_slots(self) -> frozenset[Slot]:
        return frozenset(self._readers)

    def keep_only(self, slots: Iterable[Slot]) -> None:
        """Free all owned slots except `slots`; held ones become ownerless. Raises `BlockPoolError`, changing nothing,
        if one of `slots` has no owner. O(size).
        """
        kept, owned = frozenset(slots), self.owned_slots()
        if wrong := kept - owned:
            raise BlockPoolError(f"{self._tier} pool: slots {sorted(wrong)} cannot be kept, they are not allocated")
        self._ownerless = self._readers.keys() - kept
        used = kept | self._ownerless
        self._free = [slot for slot in self._slots(self.size - 1, -1, -1) if slot not in used]

    def owned_slots(self) -> frozenset[Slot]:
        """O(size)."""
        return frozenset(self._slots(self.size)) - self._ownerless - frozenset(self._free)

    @staticmethod
    def _slots(*bounds: int) -> Sequence[Slot]:
        return cast("Sequence[Slot]", range(*bounds))

    def resize(self, size: int) -> None:
        """Grow or shrink to `size` slots. All slots above must be free. O(size)."""
        kept = [slot for slot in self._free if slot < size]
        assert len(self._free) - len(kept) == max(0, self.size - size), "slots above the new end must be free"
        self._free = [*self._slots(size - 1, self.size - 1, -1), *kept]
        self.size = size

    def check(self) -> None:
        """Raise `InvariantError` unless free and held slots are what they can be. O(size)."""
        free = frozenset(self._free)
        expect(len(free) == len(self._free), f"{self._tier} pool: a slot is on the free list twice")
        expect(free.issubset(range(self.size)), f"{self._tier} pool: a slot out of range 0..{self.size - 1} is free")
        held = free & self._readers.keys()
        expect(not held, f"{self._tier} pool: slots both free and held: {sorted(held)}")
        expect(self._ownerless <= self._readers.keys(), f"{self._tier} pool: a slot has neither owner nor reader")

    def check_readers(self, readers: Iterable[Sequence[Slot]]) -> None:
        """Raise `InvariantError` unless `readers`, each given by its slots, are all readers. O(slots held)."""
        counted = Counter(slot for slots in readers for slot in slots)
        expect(counted == self._readers, f"{self._tier} pool: slots are held without a reader, or read and not held")

    def check_owners(self, slots: Sequence[Slot]) -> None:
        """`check`, and raise `InvariantError` unless `slots`, listed by their owners, are all owned slots. O(size)."""
        self.check()
        expect(len(slots) == len(set(slots)), f"{self._tier} pool: a slot has two owners")
        expect(self.owned_slots().issuperset(slots), f"{self._tier} pool: a slot is used that is free")
        num_leaked = self.num_owned - len(slots)
        expect(not num_leaked, f"{self._tier} pool: {num_leaked} slots leaked")
