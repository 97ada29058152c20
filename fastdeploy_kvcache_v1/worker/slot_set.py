"""SlotSet: a set of slots of one tier. What it costs goes by its slots, not by how many the tier has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np
import numpy.typing as npt

from ..errors import CacheStateError

_SPREAD = 512
"""Slots of the tier per member up to which operations on bitmaps are faster than those on hash tables."""
_FEW = 64
"""Up to here, a hash table is faster made than a bitmap."""
_FEWER = 8
"""Up to here, shifting bits is faster than an array."""


class SlotSet(Set[int]):
    """An immutable set of slot numbers: a `frozenset`, or a bitmap where the set has many of the slots of its range.

    An operation on two sets goes by hash tables or by bitmaps, whichever fits the larger one. What that needs of the
    other is made then, and kept. Thread-safe.
    """

    __slots__ = ("_bits", "_end", "_members", "_most")

    def __init__(
        self, members: frozenset[int] | None = frozenset(), bits: int | None = None, *, most: int = 0, end: int = 0
    ) -> None:
        """Empty; the arguments are for `SlotSet` itself, see `of`. `most`, `end`: at least the number of members, and
        one past the highest.
        """
        self._members = members
        self._bits = bits
        """None where it was not needed yet; at least one of both is there."""
        self._most = most
        self._end = end

    @classmethod
    def of(cls, slots: Iterable[int]) -> SlotSet:
        """Raises `CacheStateError` for a negative slot. O(slots), nothing for what is a `SlotSet` already; arrays of
        integers go fastest.
        """
        if isinstance(slots, SlotSet):
            return slots
        numbers = slots if isinstance(slots, (list, tuple, np.ndarray)) else list(slots)
        count = len(numbers)
        if count > _FEW:
            is_array = isinstance(numbers, np.ndarray)
            array = np.asarray(numbers, np.int64) if is_array else np.fromiter(numbers, np.int64, count)
            end = int(array.view(np.uint64).max()) + 1  # one look for both: a negative number is a huge one then
            if end <= _SPREAD * count:
                return cls(None, _bitmap(array, end), most=count, end=end)
            numbers = array
        few = numbers.tolist() if isinstance(numbers, np.ndarray) else list(map(int, numbers))
        if not few:
            return cls()
        if min(few) < 0:
            raise CacheStateError(f"slots are not negative, got {min(few)}")
        return cls(frozenset(few), most=count, end=max(few) + 1)

    @classmethod
    def union(cls, sets: Iterable[SlotSet]) -> SlotSet:
        """As `|` of all `sets`, without a set for each step."""
        parts = [each for each in sets if each]
        if len(parts) < 2:
            return parts[0] if parts else cls()
        most, end = sum(each._most for each in parts), max(each._end for each in parts)
        if end > _SPREAD * most:
            return cls(frozenset().union(*(each._as_members() for each in parts)), most=most, end=end)
        bits = 0
        for each in parts:
            bits |= each._as_bits()
        return cls(None, bits, most=most, end=end)

    @classmethod
    def _from_iterable(cls, slots: Iterable[int]) -> SlotSet:  # type: ignore[override]
        return cls.of(slots)

    def _as_members(self) -> frozenset[int]:
        if self._members is None:
            bits = self._as_bits()
            octets = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
            self._members = frozenset(np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist())
        return self._members

    def _as_bits(self) -> int:
        if self._bits is None:
            members = self._as_members()
            if len(members) <= _FEWER:
                self._bits = sum(1 << slot for slot in members)
            else:
                self._bits = _bitmap(np.fromiter(members, np.int64, len(members)), self._end)
        return self._bits

    def _is_sparse_beside(self, other: SlotSet) -> bool:
        """Whether to use hash tables for both."""
        if self._members is not None and other._members is not None:
            return True
        if self._bits is not None and other._bits is not None:
            return False
        return max(self._end, other._end) > _SPREAD * max(self._most, other._most)

    def __contains__(self, slot: object) -> bool:
        return slot in self._as_members()

    def __iter__(self) -> Iterator[int]:
        """In ascending order."""
        return iter(sorted(self._as_members()))

    def __len__(self) -> int:
        return self._as_bits().bit_count() if self._members is None else len(self._members)

    def __bool__(self) -> bool:
        return bool(self._bits if self._members is None else self._members)

    def __eq__(self, other: object) -> bool:
        return self._as_members() == other._as_members() if isinstance(other, SlotSet) else super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash()

    def __or__(self, other: Iterable[int]) -> SlotSet:  # type: ignore[override]
        return SlotSet.union((self, SlotSet.of(other)))

    def __and__(self, other: Iterable[int]) -> SlotSet:
        other = SlotSet.of(other)
        if self._is_sparse_beside(other):
            return SlotSet(self._as_members() & other._as_members(), most=self._most, end=self._end)
        return SlotSet(None, self._as_bits() & other._as_bits(), most=self._most, end=self._end)

    def __sub__(self, other: Iterable[int]) -> SlotSet:
        other = SlotSet.of(other)
        if self._is_sparse_beside(other):
            return SlotSet(self._as_members() - other._as_members(), most=self._most, end=self._end)
        bits = self._as_bits()
        bits ^= bits & other._as_bits()  # several times as fast as `bits & ~others`
        return SlotSet(None, bits, most=self._most, end=self._end)

    def isdisjoint(self, other: Iterable[int]) -> bool:
        if not isinstance(other, SlotSet):
            other = SlotSet.of(other)
        if self._members is not None and other._members is not None:  # the most frequent case, asked here for speed
            return self._members.isdisjoint(other._members)
        if self._is_sparse_beside(other):
            return self._as_members().isdisjoint(other._as_members())
        return not self._as_bits() & other._as_bits()

    def __repr__(self) -> str:
        return f"SlotSet({list(self)})"


def _bitmap(slots: npt.NDArray[np.int64], end: int) -> int:
    marks = np.zeros(end, np.bool_)
    marks[slots] = True
    return int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")
