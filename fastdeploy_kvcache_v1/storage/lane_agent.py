"""LaneAgent: what the storage agents of all backends have in common, a thread that hands commands to lanes."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import zmq

from .lane import Lane

__all__ = ["LaneAgent"]

logger = logging.getLogger(__name__)

POLL_MS = 100
STOP_TIMEOUT_S = 2.0


class LaneAgent(ABC):
    """A worker rank's end of a `StorageLink`. Commands reach the lane that they are for in order of arrival."""

    def __init__(self, commands_address: str, results_address: str) -> None:
        """Connects at once. The subclass makes its lanes, and calls `_start` then."""
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.connect(commands_address)
        self._results = (self._context, results_address)
        self._lanes: Sequence[Lane] = ()
        self._stop = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="kv-storage", daemon=True)

    def _start(self, *lanes: Lane) -> None:
        self._lanes = lanes
        self._receiver.start()

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
        self._stop.set()
        self._receiver.join()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        hanging = [lane.name for lane in self._lanes if not lane.close(deadline)]
        if hanging:  # these threads still use the context
            logger.warning("%s did not end: the store hangs", " and ".join(hanging))
        else:
            self._context.destroy(linger=0)
        return not hanging

    def _receive(self) -> None:
        with self._commands as socket:
            while not self._stop.is_set():
                if socket.poll(POLL_MS):
                    command = pickle.loads(socket.recv())
                    for lane in self._lanes_for(command):
                        lane.do(command)
