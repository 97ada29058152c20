"""BlockPool: which slots of a tier are free, owned, and held by readers.

The prefix tree, requests and loads own slots. Slots freed last are reused first, whole runs at a time, so that
neighbours tend to stay together and their copies coalesce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Generic, TypeVar

from ..errors import BlockPoolError
from .invariants import expect

Slot = TypeVar("Slot", bound=int)


class BlockPool(Generic[Slot]):
    """Slots `0 .. size-1` of one tier, `tier` in messages. A call costs O(slots passed) unless it says otherwise. Not
    thread-safe.

    A held slot keeps its bytes. When its owner frees it, it is *ownerless*, neither owned nor free, until its last
    reader releases it.
    """

    def __init__(self, tier: str, size: int) -> None:
        self.size = 0
        self._tier = tier
        self._free: list[Slot] = []
        self._owned: list[bool] = []
        """True for each slot that has an owner. A list: its elements take half as long to read and write as bytes."""
        self._readers: dict[Slot, int] = {}
        """Number of readers of each held slot."""
        self._num_ownerless = 0
        self.resize(size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self.size - len(self._free) - self._num_ownerless

    @property
    def num_held(self) -> int:
        """Number of slots that have an owner and would become ownerless if it freed them."""
        return len(self._readers) - self._num_ownerless

    def allocate(self, count: int) -> list[Slot]:
        """Give the caller `count` slots. Raises `BlockPoolError` if fewer are free: ask `num_free` first."""
        if not 0 <= count <= len(self._free):
            raise BlockPoolError(f"{self._tier} pool: {count} slots wanted, {len(self._free)} of {self.size} free")
        start = len(self._free) - count
        slots = self._free[start:]
        del self._free[start:]
        slots.reverse()
        owned = self._owned
        for slot in slots:
            owned[slot] = True
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Take `slots` back. Raises `BlockPoolError`, freeing none, if one has no owner or is named twice."""
        owned, rest = self._owned, iter(slots)
        try:  # one pass: checking all of them first takes nearly twice as long
            for slot in rest:
                if slot >= 0 and owned[slot]:
                    owned[slot] = False
                else:
                    raise IndexError
        except IndexError:
            done = len(slots) - len(list(rest)) - 1
            for slot in slots[: max(0, done)]:
                owned[slot] = True
            wrong = "outside the pool, not allocated, or named twice"
            raise BlockPoolError(f"{self._tier} pool: a freed slot is {wrong}: {list(slots)[:8]}") from None
        unread = [slot for slot in slots if slot not in self._readers] if self._readers else slots
        self._num_ownerless += len(slots) - len(unread)
        self._free.extend(reversed(unread))

    def hold(self, slots: Sequence[Slot]) -> None:
        """Add a reader to each of `slots`, which have an owner. Their bytes stay until `release_held`."""
        for slot in slots:
            assert self._owned[slot], "only a slot that has an owner can be held"
            self._readers[slot] = self._readers.get(slot, 0) + 1

    def release_held(self, slots: Sequence[Slot]) -> None:
        for slot in reversed(slots):
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if not self._owned[slot]:
                    self._num_ownerless -= 1
                    self._free.append(slot)

    def is_held(self, slot: Slot) -> bool:
        return slot in self._readers

    def held_slots(self) -> frozenset[Slot]:
        return frozenset(self._readers)

    def keep_only(self, slots: Iterable[Slot]) -> None:
        """Free all owned slots except `slots`; held ones become ownerless. Raises `BlockPoolError`, changing nothing,
        if one of `slots` has no owner. O(size).
        """
        owned, is_free = [False] * self.size, [True] * self.size
        for slot in slots:
            if not 0 <= slot < self.size or not self._owned[slot]:
                raise BlockPoolError(f"{self._tier} pool: slot {slot} cannot be kept, it is not allocated")
            owned[slot], is_free[slot] = True, False
        for slot in self._readers:
            is_free[slot] = False
        self._owned = owned
        self._num_ownerless = sum(not owned[slot] for slot in self._readers)
        self._free = list(compress(range(self.size - 1, -1, -1), reversed(is_free)))  # type: ignore[arg-type]

    def owned_slots(self) -> frozenset[Slot]:
        """O(size)."""
        return frozenset(compress(range(self.size), self._owned))  # type: ignore[arg-type]

    def resize(self, size: int) -> None:
        """Grow or shrink to `size` slots. All slots above must be free. O(size)."""
        kept = [slot for slot in self._free if slot < size]
        assert len(self._free) - len(kept) == max(0, self.size - size), "slots above the new end must be free"
        self._free = [*range(size - 1, self.size - 1, -1), *kept]
        self._owned = self._owned[:size] + [False] * (size - self.size)
        self.size = size

    def check(self) -> None:
        """Raise `InvariantError` unless each slot of `0 .. size-1` is either free, or owned or held. O(size)."""
        free, used = set(self._free), self.owned_slots() | self._readers.keys()
        expect(len(free) == len(self._free), f"{self._tier} pool: a slot is on the free list twice")
        expect(not free & used, f"{self._tier} pool: slots both free and allocated: {sorted(free & used)}")
        is_whole = free | used == set(range(self.size)) and len(self._owned) == self.size
        expect(is_whole, f"{self._tier} pool: slots lost or out of range 0..{self.size - 1}")

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
