"""The message with the copies of one step for every worker rank, and its codec. Both servers send it.

It consists of tuples, integers and bytes, because FastDeploy's queue server unpickles it without this package. Every
message names the step of the message before, so a lost batch is an error in the worker and not a missing copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

from ..errors import MessageVersionError, TransferError
from .messages import BlockCopies, CacheLevel, SwapStep

VERSION = 3
"""Of `SwapMessage`."""
START = -1
"""The step before the first message, and before the first message after a reset of the cache."""
SwapMessage = tuple[int, int, int, tuple[tuple[int, int, bytes, bytes], ...], bytes]
"""VERSION, step, step of the message before or START, for each transfer: source tier, target tier (indices of `TIERS`),
source slots, target slots; and the slots that were refilled. Slots are `SlotArray.packed`."""
TIERS = (CacheLevel.DEVICE, CacheLevel.HOST, CacheLevel.STORAGE)
_PLACES = {level: place for place, level in enumerate(TIERS)}
_TYPE: Final = "i"
"""int32 in this machine's byte order."""


class SlotArray(Sequence[int]):
    """Immutable slots as packed int32, equal to any sequence of the same slots.

    Making thousands of Python integers would cost the worker more than planning their copies. Free of NumPy, as the
    scheduler half is.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        """int32 `[slots]`."""

    @classmethod
    def of(cls, slots: Iterable[int]) -> SlotArray:
        """Pack `slots`. Raises `TypeError` if one is no integer, `OverflowError` beyond 32 bits."""
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
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[SlotArray], tuple[bytes]]:
        return SlotArray, (self.packed,)

    def __repr__(self) -> str:
        return f"SlotArray.of({list(self)})"


class SwapEncoder:
    """Chains the engine's messages. Not thread-safe."""

    def __init__(self) -> None:
        self._last = START

    def encode(self, step: SwapStep) -> SwapMessage:
        """Make the message for `step`, which counts as sent."""
        message = encode(step, self._last)
        self._last = step.step
        return message

    def restart(self) -> None:
        """Begin a new chain after a reset of the cache: lost messages before it do not matter."""
        self._last = START


class SwapDecoder:
    """Checks the chain in a worker rank. Not thread-safe."""

    def __init__(self) -> None:
        self._last = START

    def decode(self, message: SwapMessage) -> SwapStep:
        """Raises `MessageVersionError` for another version, `TransferError` if a message before it was lost."""
        step, previous = decode(message)
        if previous not in (self._last, START):
            raise TransferError(
                f"got swap step {step.step} behind step {previous}, expected one behind step {self._last}: a batch "
                "was lost between scheduler and worker, cached blocks cannot be trusted; restart the server"
            )
        self._last = step.step
        return step


def encode(step: SwapStep, previous: int) -> SwapMessage:
    """Make the message. `previous` is the step of the message before, or START."""
    copies = [
        (
            _PLACES[each.source],
            _PLACES[each.target],
            SlotArray.of(each.source_slots).packed,
            SlotArray.of(each.target_slots).packed,
        )
        for each in step.transfers
    ]
    return VERSION, step.step, previous, tuple(copies), SlotArray.of(step.refilled).packed


def decode(message: SwapMessage) -> tuple[SwapStep, int]:
    """Return the step and the step of the message before. Raises `MessageVersionError`."""
    version = message[0] if isinstance(message, tuple) and message else message
    if version != VERSION:
        raise MessageVersionError("swap message", found=version, expected=VERSION)
    _, number, previous, copies, refilled = message
    transfers = [
        BlockCopies(TIERS[source], TIERS[target], SlotArray(sources), SlotArray(targets))
        for source, target, sources, targets in copies
    ]
    return SwapStep(number, tuple(transfers), SlotArray(refilled)), previous
