"""Pools of slots: which blocks of a tier are free.

A pool knows which slots have an owner, and which are read from outside; the prefix tree, requests and loans own them.
Last freed, first reused, whole runs at a time, so that neighbouring slots tend to stay together (copies coalesce them).
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
    """Slots `0 .. size-1` of one tier. Cost of a call: O(slots handed over), never O(size). Not thread-safe.

    A slot that is held keeps its bytes: once its owner has given it back it is *ownerless*, neither owned nor free,
    until its last reader lets go of it.
    """

    def __init__(self, tier: str, size: int) -> None:
        """`tier` is its name in messages."""
        self.size = 0
        self._tier = tier
        self._free: list[Slot] = []
        self._owned = bytearray()
        """1 for each slot that has an owner."""
        self._readers: dict[Slot, int] = {}
        """How many readers from outside hold a slot, for each that is held."""
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
        """Slots with an owner that would not be free if the owner gave them back now."""
        return len(self._readers) - self._num_ownerless

    def allocate(self, count: int) -> list[Slot]:
        """`count` slots for the caller to own. Raises `BlockPoolError` when fewer are free: ask `num_free` first."""
        if not 0 <= count <= len(self._free):
            raise BlockPoolError(f"{self._tier} pool: {count} slots wanted, {len(self._free)} of {self.size} free")
        start = len(self._free) - count
        slots = self._free[start:]
        del self._free[start:]
        slots.reverse()
        owned = self._owned
        for slot in slots:
            owned[slot] = 1
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Take `slots` back. Raises `BlockPoolError`, freeing none, if one has no owner or is named twice."""
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
            raise BlockPoolError(f"{self._tier} pool: a freed slot is {wrong}: {list(slots)[:8]}") from None
        unread = [slot for slot in slots if slot not in self._readers] if self._readers else slots
        self._num_ownerless += len(slots) - len(unread)
        self._free.extend(reversed(unread))

    def hold(self, slots: Sequence[Slot]) -> None:
        """One more reader of each of `slots`, which have an owner: until `let_go` their bytes stay as they are."""
        for slot in slots:
            assert self._owned[slot], "only what has an owner is read"
            self._readers[slot] = self._readers.get(slot, 0) + 1

    def release_held(self, slots: Sequence[Slot]) -> None:
        """One reader less of each of `slots`."""
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
        """Owned are `slots`, and no others; what is held does not become free. Raises `BlockPoolError`, changing
        nothing, if one of `slots` has no owner. O(size).
        """
        owned, is_free = bytearray(self.size), bytearray(b"\1") * self.size
        for slot in slots:
            if not 0 <= slot < self.size or not self._owned[slot]:
                raise BlockPoolError(f"{self._tier} pool: slot {slot} cannot be kept, it is not allocated")
            owned[slot], is_free[slot] = 1, 0
        for slot in self._readers:
            is_free[slot] = 0
        self._owned = owned
        self._num_ownerless = sum(not owned[slot] for slot in self._readers)
        self._free = list(compress(range(self.size - 1, -1, -1), reversed(is_free)))  # type: ignore[arg-type]

    def owned_slots(self) -> frozenset[Slot]:
        """O(size), for checks and rare events."""
        return frozenset(compress(range(self.size), self._owned))  # type: ignore[arg-type]

    def resize(self, size: int) -> None:
        """Grow or shrink to `size` slots; each above is free. O(size)."""
        kept = [slot for slot in self._free if slot < size]
        assert len(self._free) - len(kept) == max(0, self.size - size), "what is in use is not taken away"
        self._free = [*range(size - 1, self.size - 1, -1), *kept]
        self._owned = self._owned[:size].ljust(size, b"\0")
        self.size = size

    def check(self) -> None:
        """Raises `InvariantError` unless free, owned and held slots are `0 .. size-1`, and no free one is another."""
        free, used = set(self._free), self.owned_slots() | self._readers.keys()
        expect(len(free) == len(self._free), f"{self._tier} pool: a slot is on the free list twice")
        expect(not free & used, f"{self._tier} pool: slots both free and allocated: {sorted(free & used)}")
        is_whole = free | used == set(range(self.size)) and len(self._owned) == self.size
        expect(is_whole, f"{self._tier} pool: slots lost or out of range 0..{self.size - 1}")

    def check_readers(self, readers: Iterable[Sequence[Slot]]) -> None:
        """Raises `InvariantError` unless `readers`, each by its slots, are the ones that hold slots. O(slots held)."""
        counted = Counter(slot for slots in readers for slot in slots)
        expect(counted == self._readers, f"{self._tier} pool: slots are held by nobody, or read and not held")

    def check_owners(self, slots: Sequence[Slot]) -> None:
        """`check`, and raises `InvariantError` unless `slots`, which all owners hold, are the owned ones."""
        self.check()
        expect(len(slots) == len(set(slots)), f"{self._tier} pool: a slot has two owners")
        expect(self.owned_slots().issuperset(slots), f"{self._tier} pool: a slot is used that is free")
        num_leaked = self.num_owned - len(slots)
        expect(not num_leaked, f"{self._tier} pool: {num_leaked} slots leaked")
