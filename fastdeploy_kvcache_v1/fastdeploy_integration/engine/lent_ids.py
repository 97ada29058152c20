"""LentIds: device blocks that FastDeploy has in its own block tables, and which request they were lent to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...contract.messages import DeviceSlot, NoSpace
from ...errors import CacheStateError, InvariantError
from ...scheduler.cache_manager import CacheManager

logger = logging.getLogger(__name__)


class LentIds:
    """Not thread-safe: the adapter's lock covers it."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._lent_to: dict[DeviceSlot, str | None] = {}

    def lend(self, count: int, request_id: str | None) -> list[DeviceSlot]:
        """Raises `CacheStateError` when there are too few."""
        slots = self._manager.lend(count)
        if isinstance(slots, NoSpace):
            raise CacheStateError(f"request {request_id}: got {slots.available} device blocks, needs {slots.needed}")
        self._lent_to.update(dict.fromkeys(slots, request_id))
        return slots

    def take_back(self, ids: Sequence[Any], request_id: str | None) -> int:
        """Returns how many of `ids` are not lent (to that request), which are left alone."""
        mine = [slot for slot in dict.fromkeys(map(DeviceSlot, map(int, ids))) if self._is_lent(slot, request_id)]
        num_wrong = len(ids) - len(mine)
        if num_wrong:
            logger.warning("request %s returned %d block ids that it lacks: ignored", request_id, num_wrong)
        self._manager.take_back(mine)
        self.end(mine)
        return num_wrong

    def end(self, slots: Sequence[DeviceSlot]) -> None:
        """They belong to the manager again."""
        for slot in slots:
            del self._lent_to[slot]

    def clear(self) -> None:
        """The manager was reset: all ids are free."""
        self._lent_to.clear()

    def check(self) -> None:
        """Raises `InvariantError`."""
        if self._manager.lent_slots() != self._lent_to.keys():
            raise InvariantError("adapter: it knows other lent blocks than the manager")

    def _is_lent(self, slot: DeviceSlot, request_id: str | None) -> bool:
        if slot not in self._lent_to:
            return False
        owner = self._lent_to[slot]
        return owner is None or request_id is None or owner == request_id
