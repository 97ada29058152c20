"""How the host memory of worker ranks gets into the store process: over the link of each rank to its engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..link.engine import EngineLink
from ..link.messages import Gone, Memory, Released
from ..link.rank import RankLink
from .process import StoreProcess

__all__ = ["RankMemory", "memory_handlers"]

logger = logging.getLogger(__name__)

RELEASE_S = 2.0


def memory_handlers(link: EngineLink, store: StoreProcess) -> Mapping[type, Callable[[int, Any], None]]:
    """For `EngineLink.listen`: ranks make the host tier when they have cache tensors, and may drop it."""

    def made(rank: int, memory: Memory) -> None:
        store.use_memory(rank, memory.file, memory.slots, memory.slot_bytes)

    def gone(rank: int, message: Gone) -> None:
        store.drop_memory(rank, lambda: link.send(Released(message.generation), rank))

    return {Memory: made, Gone: gone}


class RankMemory:
    """A rank's end. One thread uses it."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._generation = -1
        self._released = threading.Event()
        self.handlers: Mapping[type, Callable[[Any], None]] = {Released: self._is_released}
        """For `RankLink.listen`."""

    def use(self, file: int, num_slots: int, slot_bytes: int) -> None:
        """The host tier is in the memory of the descriptor `file`, which stays the caller's."""
        self._generation += 1
        self._link.send(Memory(self._generation, num_slots, slot_bytes), file)

    def let_go(self) -> None:
        """Call before the host tier loses its memory. Waits until the store process has unmapped it, but not long:
        until then only the room is missing, since a mapping keeps its memory.
        """
        self._released.clear()
        self._link.send(Gone(self._generation))
        if self._link.is_connected and not self._released.wait(RELEASE_S):
            logger.warning("the store process still maps the host tier after %.0f s: its memory goes later", RELEASE_S)

    def _is_released(self, message: Released) -> None:
        if message.generation == self._generation:
            self._released.set()
