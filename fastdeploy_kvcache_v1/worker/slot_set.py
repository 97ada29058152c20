"""SlotSet: a set of slots. Its costs depend on its size, not on the size of the tier."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from pyroaring import FrozenBitMap

from ..errors import CacheStateError

SlotSet = FrozenBitMap
"""A roaring bitmap: immutable, ascending. Its operators accept only another SlotSet."""

NO_SLOTS = SlotSet()


def slot_set(slots: Iterable[int]) -> SlotSet:
    """Make a set of `slots`; free for a SlotSet. Raises `CacheStateError` for negative numbers or beyond 32 bits."""
    if isinstance(slots, FrozenBitMap):
        return slots
    # Sorted numbers are several times as fast.
    numbers = np.sort(slots if isinstance(slots, np.ndarray) else np.fromiter(slots, np.int64))
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >> 32):
        raise CacheStateError(f"slots are in [0, {1 << 32}), got {numbers[0]} to {numbers[-1]}")
    return SlotSet(array("I", numbers.astype(np.uint32).tobytes()))
