"""SlotArray: slots of one tier in a fixed order, as integers that lie side by side and not as thousands of objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

_TYPE: Final = "i"
"""Of `array`: 32 bits with a sign, in this machine's byte order."""


class SlotArray(Sequence[int]):
    """Immutable, and equal to any sequence of the same slots. What a worker receives: making and dropping thousands of
    integers costs it more than planning their copies. Free of NumPy, as the scheduler half is.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        """`packed`: as `packed` of another one."""
        self.packed = packed
        """int32 `[slots]`."""

    @classmethod
    def of(cls, slots: Iterable[int]) -> SlotArray:
        """Raises `TypeError` for what is no integer, `OverflowError` for one beyond 32 bits."""
        return slots if isinstance(slots, SlotArray) else cls(array(_TYPE, slots).tobytes())

    def __len__(self) -> int:
        return len(self.packed) // 4

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> SlotArray: ...

    def __getitem__(self, index: int | slice) -> int | SlotArray:
        slots = memoryview(self.packed).cast(_TYPE)
        return SlotArray(slots[index].tobytes()) if isinstance(index, slice) else slots[index]

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.packed).cast(_TYPE))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SlotArray):
            return self.packed == other.packed
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """As of the tuple that it equals."""
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[SlotArray], tuple[bytes]]:
        return SlotArray, (self.packed,)

    def __repr__(self) -> str:
        return f"SlotArray.of({list(self)})"
