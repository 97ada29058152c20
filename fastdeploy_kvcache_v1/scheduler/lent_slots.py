"""LentSlots: device slots of a scheduler that keeps its own block tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import BlockPoolError
from ..metadata import DeviceSlot


class LentSlots:
    """Slots that a borrower owns, outside any request. Not thread-safe: the manager's lock covers it."""

    def __init__(self) -> None:
        self._slots: set[DeviceSlot] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[DeviceSlot]:
        return iter(self._slots)

    def lend(self, slots: Sequence[DeviceSlot]) -> None:
        self._slots.update(slots)

    def end(self, slots: Sequence[DeviceSlot]) -> None:
        """`slots` are lent no longer. Raises `BlockPoolError`, changing nothing, unless each is lent and named once."""
        named = set(slots)
        if wrong := named - self._slots:
            raise BlockPoolError(f"slots {sorted(wrong)} are not lent: name slots that `lend` returned")
        if len(named) != len(slots):
            raise BlockPoolError(f"a lent slot was named twice: {sorted(slots)[:8]}")
        self._slots -= named

    def end_all(self) -> None:
        """Every slot is lent no longer."""
        self._slots.clear()
