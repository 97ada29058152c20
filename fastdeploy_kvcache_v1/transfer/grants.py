"""Grants: which blocks may be read under which lease."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

__all__ = ["Grants"]

Rows = npt.NDArray[np.int64]


class Grants:
    """Thread-safe: each change is one assignment in a dictionary."""

    def __init__(self) -> None:
        self._slots: dict[str, Rows] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def grant(self, lease: str, slots: Collection[int]) -> None:
        """See `DataPlane.grant`."""
        self._slots[lease] = np.unique(np.fromiter(slots, np.int64, len(slots)))

    def revoke(self, lease: str) -> None:
        """See `DataPlane.revoke`."""
        self._slots.pop(lease, None)

    def is_open(self, lease: str) -> bool:
        """Whether it was granted and not revoked."""
        return lease in self._slots

    def allow(self, lease: str, first_rows: Rows, last_rows: Rows) -> bool:
        """Whether `lease` is over every row of all ranges `[first, last]`. O(ranges * log slots)."""
        slots = self._slots.get(lease)
        if slots is None:
            return False
        held = np.searchsorted(slots, last_rows, side="right") - np.searchsorted(slots, first_rows, side="left")
        return bool((held == last_rows - first_rows + 1).all())
