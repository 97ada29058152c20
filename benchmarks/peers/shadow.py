"""A data plane of names: checks that a cache manager finds only blocks that were computed, where they were computed.

Each slot of both tiers holds the name of the prefix that ends in its block, or `NOTHING`. Names are numbers from 1 up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NOTHING = 0

Names = npt.NDArray[np.uint32]


class Lie(AssertionError):
    """A contender's table contradicts what was computed."""


class ShadowPlane:
    """The slots of one contender. Not thread-safe."""

    def __init__(self) -> None:
        self._names = np.zeros(1024, np.uint32)
        self._users = np.zeros(1024, np.int32)
        self._host = np.zeros(1024, np.uint32)

    def copy(self, is_out: bool, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Blocks are copied from the device to the host, or back.

        Raises `Lie` for a source that holds nothing, a slot that is twice a target, and for a device slot that an open
        request uses.
        """
        device, host = (sources, targets) if is_out else (targets, sources)
        there, here = self._indices(device), np.asarray(host, np.int64)
        self._host = longer(self._host, here)
        names = self._names[there] if is_out else self._host[here]
        if not np.all(names):
            raise Lie("a block was copied that was never computed")
        if len(np.unique(here if is_out else there)) < len(here):
            raise Lie("two blocks were copied into one slot")
        if is_out:
            self._host[here] = names
        elif np.any(self._users[there]):
            raise Lie("a block was copied into a slot that an open request uses")
        else:
            self._names[there] = names

    def start(self, names: Names, table: Sequence[int], matched: int) -> None:
        """A request got `table`, a slot per block of its prompt, of which the first `matched` hold its prefix.

        Raises `Lie` for a matched slot that holds another prefix, a slot twice in a table, and for a new slot that an
        open request uses.
        """
        slots = self._indices(table)
        found, expected = self._names[slots[:matched]], names[:matched]
        if matched > len(names) or not np.array_equal(found, expected):
            wrong = int(np.argmin(found == expected[: len(found)])) if matched <= len(names) else len(names)
            raise Lie(f"block {wrong} of {len(names)} was matched, but its slot does not hold this prefix")
        if len(np.unique(slots)) < len(slots):
            raise Lie("a slot is twice in one table")
        if np.any(self._users[slots[matched:]]):
            raise Lie("a slot was allocated that another request uses")
        self._users[slots] += 1
        self._names[slots[matched:]] = NOTHING

    def commit(self, names: Names, table: Sequence[int]) -> None:
        """The blocks of a request have been computed."""
        self._names[self._indices(table[: len(names)])] = names

    def finish(self, table: Sequence[int]) -> None:
        self._users[self._indices(table)] -= 1

    def _indices(self, table: Sequence[int]) -> npt.NDArray[np.int64]:
        slots = np.asarray(table, np.int64)
        self._names, self._users = longer(self._names, slots), longer(self._users, slots)
        return slots


def longer(values: npt.NDArray[Any], slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """`values` with a place for each of `slots`."""
    if (missing := int(slots.max(initial=-1)) + 1 - len(values)) > 0:
        return np.concatenate([values, np.zeros(missing + len(values), values.dtype)])
    return values
