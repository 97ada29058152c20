"""The message that tells every worker rank the copies of one step, and its one codec. Both servers send it.

It is made of tuples, integers and bytes: in FastDeploy it rides on a task, and FastDeploy's queue server unpickles
tasks without this package. Every message names the step of the one before it, so a batch that is lost on the way is an
error in the worker, and never a block that was not copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

from ..errors import MessageVersionError, TransferError
from .messages import BlockCopies, CacheLevel, SwapStep

VERSION = 2
"""Counts the changes of `SwapMessage`."""

START = -1
"""Stands for the step before the first message, and before the first one after the cache was reset."""

SwapMessage = tuple[int, int, int, tuple[tuple[int, int, bytes, bytes], ...]]
"""VERSION, step, step of the message before or START, and for each transfer of the step: source tier, target tier
(places in `TIERS`), source slots, target slots (as in `SlotArray`)."""

TIERS = (CacheLevel.DEVICE, CacheLevel.HOST, CacheLevel.STORAGE)

_PLACES = {level: place for place, level in enumerate(TIERS)}

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


class SwapEncoder:
    """The engine's end of the chain of messages. Not thread-safe."""

    def __init__(self) -> None:
        self._last = START

    def encode(self, step: SwapStep) -> SwapMessage:
        """The message for `step`, which counts as sent."""
        message = encode(step, self._last)
        self._last = step.step
        return message

    def restart(self) -> None:
        """Earlier messages no longer matter, received or lost: the cache has been reset."""
        self._last = START


class SwapDecoder:
    """A worker rank's end of the chain of messages. Not thread-safe."""

    def __init__(self) -> None:
        self._last = START

    def decode(self, message: SwapMessage) -> SwapStep:
        """Raises `MessageVersionError` for a message of another version, `TransferError` when one before was lost."""
        step, previous = decode(message)
        if previous not in (self._last, START):
            raise TransferError(
                f"swap step {step.step} follows step {previous}, but the last one that arrived is {self._last}: "
                "a batch was lost between scheduler and worker, cached blocks cannot be trusted"
            )
        self._last = step.step
        return step


def encode(step: SwapStep, previous: int) -> SwapMessage:
    """`previous`: step of the message before, or START."""
    copies = [
        (
            _PLACES[each.source],
            _PLACES[each.target],
            SlotArray.of(each.source_slots).packed,
            SlotArray.of(each.target_slots).packed,
        )
        for each in step.transfers
    ]
    return VERSION, step.step, previous, tuple(copies)


def decode(message: SwapMessage) -> tuple[SwapStep, int]:
    """The step, and the step of the message before. Raises `MessageVersionError`."""
    version = message[0] if isinstance(message, tuple) and message else message
    if version != VERSION:
        raise MessageVersionError("swap message", found=version, expected=VERSION)
    _, number, previous, copies = message
    transfers = [
        BlockCopies(TIERS[source], TIERS[target], SlotArray(sources), SlotArray(targets))
        for source, target, sources, targets in copies
    ]
    return SwapStep(number, tuple(transfers)), previous
