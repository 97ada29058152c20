"""SlotSet: slots of one tier as a bitmap, so that two sets are compared by a few machine words per thousand slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np

from ..errors import CacheStateError

_FEW = 8
"""Up to here, shifting bits is faster than an array."""


class SlotSet(Set[int]):
    """An immutable set of slot numbers. `bits` has bit i set for slot i; its size follows the highest slot."""

    __slots__ = ("bits",)

    def __init__(self, bits: int = 0) -> None:
        self.bits = bits

    @classmethod
    def of(cls, slots: Iterable[int]) -> SlotSet:
        """Raises `CacheStateError` for a negative slot. O(slots), nothing for what is a `SlotSet` already."""
        return slots if isinstance(slots, SlotSet) else cls(bitmap(slots))

    @classmethod
    def _from_iterable(cls, slots: Iterable[int]) -> SlotSet:  # type: ignore[override]
        return cls.of(slots)

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and slot >= 0 and bool(self.bits >> slot & 1)

    def __iter__(self) -> Iterator[int]:
        """In ascending order."""
        return iter(slots_of(self.bits))

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return bool(self.bits)

    def __eq__(self, other: object) -> bool:
        return self.bits == other.bits if isinstance(other, SlotSet) else super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash()

    def __or__(self, other: Iterable[int]) -> SlotSet:  # type: ignore[override]
        return SlotSet(self.bits | bitmap(other))

    def __and__(self, other: Iterable[int]) -> SlotSet:
        return SlotSet(self.bits & bitmap(other))

    def __sub__(self, other: Iterable[int]) -> SlotSet:
        return SlotSet(without(self.bits, bitmap(other)))

    def isdisjoint(self, other: Iterable[int]) -> bool:
        return not self.bits & bitmap(other)

    def __repr__(self) -> str:
        return f"SlotSet({list(self)})"


def bitmap(slots: Iterable[int]) -> int:
    """Bit i is set for slot i; arrays of integers go fastest. Raises `CacheStateError` for a negative slot."""
    if isinstance(slots, SlotSet):
        return slots.bits
    numbers = slots if isinstance(slots, (list, tuple, np.ndarray)) else list(slots)
    if len(numbers) <= _FEW:
        if len(numbers) and min(numbers) < 0:
            raise CacheStateError(f"slots are not negative, got {min(numbers)}")
        bits = 0
        for number in numbers:
            bits |= 1 << int(number)
        return bits
    is_array = isinstance(numbers, np.ndarray)
    array = np.asarray(numbers, np.int64) if is_array else np.fromiter(numbers, np.int64, len(numbers))
    highest = int(array.view(np.uint64).max())  # one look for both: a negative number is a huge one then
    if highest >= 1 << 63:
        raise CacheStateError(f"slots are not negative, got {array.min()}")
    marks = np.zeros(highest + 1, np.bool_)
    marks[array] = True
    return int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")


def without(bits: int, others: int) -> int:
    """`bits & ~others`, several times as fast: Python inverts a long bitmap digit by digit."""
    return bits ^ (bits & others)


def slots_of(bits: int) -> list[int]:
    """The slots of a bitmap, in ascending order."""
    octets = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    slots: list[int] = np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
    return slots
