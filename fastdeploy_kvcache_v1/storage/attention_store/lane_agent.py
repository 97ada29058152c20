"""LaneAgent: what the storage agents of all backends have in common: they hand commands to lanes."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from .lane import Lane

__all__ = ["LaneAgent"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0


class LaneAgent(ABC):
    """A worker rank's end of a `StorageLink`. Commands reach the lane that they are for in order of arrival."""

    COMMANDS: tuple[type, ...]

    def __init__(self, answer: Callable[[Any], None]) -> None:
        """`answer` sends to the engine. The subclass makes its lanes."""
        self._answer = answer
        self._lanes: Sequence[Lane] = ()

    @property
    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Of commands, for `RankLink.listen`."""
        return dict.fromkeys(self.COMMANDS, self.hear)

    def hear(self, command: Any) -> None:
        """Any thread. Never blocks."""
        for lane in self._lanes_for(command):
            lane.do(command)

    @abstractmethod
    def _lanes_for(self, command: Any) -> Sequence[Lane]:
        """Whom `command` is for; a `UseNamespace` is for all."""

    def settle(self) -> bool:
        """Waits for what is being moved, but not long. False if the store hangs."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        return all(lane.settle(deadline) for lane in self._lanes)

    def close(self) -> bool:
        """Waits for what is being moved, but not long, and drops the rest. May be called again.

        False if the store hangs: it may still read and fill slots, so their memory must stay.
        """
        deadline = time.monotonic() + STOP_TIMEOUT_S
        hanging = [lane.name for lane in self._lanes if not lane.close(deadline)]
        if hanging:
            logger.warning("%s did not end: the store hangs", " and ".join(hanging))
        return not hanging
