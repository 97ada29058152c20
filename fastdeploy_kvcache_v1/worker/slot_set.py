"""SlotSet: a set of slots of one tier. What it costs goes by its slots, not by how many the tier has."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from pyroaring import FrozenBitMap

from ..errors import CacheStateError

SlotSet = FrozenBitMap
"""A roaring bitmap: immutable, in ascending order. Its operators take nothing but another one."""

NO_SLOTS = SlotSet()


def slot_set(slots: Iterable[int]) -> SlotSet:
    """The set of `slots`, which costs nothing where it is one already. Raises `CacheStateError` for a negative number
    or one beyond 32 bits.
    """
    if isinstance(slots, FrozenBitMap):
        return slots
    # Sorted, because the bitmap takes numbers in order several times as fast.
    numbers = np.sort(slots if isinstance(slots, np.ndarray) else np.fromiter(slots, np.int64))
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >> 32):
        raise CacheStateError(f"slots are in [0, {1 << 32}), got {numbers[0]} to {numbers[-1]}")
    return SlotSet(array("I", numbers.astype(np.uint32).tobytes()))
