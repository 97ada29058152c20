"""StorageAgent: a worker rank's threads that move blocks between its host slots and the store.

The scheduler gives each slot to one owner at a time, and tells when it may be read or filled; so the agent needs no
order with copies and compute, and they never wait for it. Loads and stores have a lane each: a store that hangs stops
no load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import StorageError
from .base import SlotMemory, StorageBackend, StorageFullError, StoreKey
from .lane import Lane
from .lane_agent import LaneAgent
from .messages import LoadBlocks, LoadDone, RankDone, StoreBlocks, StoreDone
from .namespace import Namespace, block_key
from .seal import is_sealed, seal

__all__ = ["STORE_NICENESS", "StorageAgent"]

logger = logging.getLogger(__name__)

STORE_NICENESS = 10
"""Of the thread that stores: it gives way to whatever serves requests."""


class StorageAgent(LaneAgent):
    """Answers every `LoadBlocks` and every `StoreBlocks`, each kind in order of arrival."""

    def __init__(
        self,
        commands_address: str,
        results_address: str,
        *,
        rank: int,
        open_backend: Callable[[Namespace], StorageBackend],
    ) -> None:
        """Connects at once, and starts its threads. Commands before `use` fail."""
        super().__init__(commands_address, results_address)
        self._rank = rank
        self._slot: Callable[[int], memoryview] = _no_slot
        self._memory: SlotMemory | None = None
        self._refilled: Callable[[Sequence[int]], None] = lambda slots: None
        self._open_backend = open_backend
        self._loads = Lane(
            "kv-storage-load",
            open_backend=self._open,
            work=self._load,
            on_error=lambda command, error: RankDone(rank, LoadDone(command.load_id, 0, error=error)),
            results=self._results,
        )
        self._stores = Lane(
            "kv-storage-store",
            open_backend=self._open,
            work=self._store,
            on_error=lambda command, error: RankDone(rank, StoreDone(command.store_id, 0, error=error)),
            results=self._results,
            niceness=STORE_NICENESS,
        )
        self._start(self._loads, self._stores)

    def use(
        self,
        slot: Callable[[int], memoryview],
        memory: SlotMemory | None = None,
        refilled: Callable[[Sequence[int]], None] = lambda slots: None,
    ) -> None:
        """From here on host slots have memory: `slot` gives the bytes of one, its trailer included. `memory` is all of
        it, where it is one piece: for stores that need to know. `refilled` is told of slots that a load has filled.
        """
        self._memory = memory
        self._refilled = refilled
        self._slot = slot
        for lane in self._lanes:
            lane.reconnect()

    def let_go(self) -> bool:
        """From here on host slots have no memory. Waits for what is being moved, but not long.

        False if the store hangs: it may still read and fill the memory, so that must stay.
        """
        self._slot = _no_slot
        return self.settle()

    def _open(self, namespace: Namespace) -> StorageBackend:
        backend = self._open_backend(namespace)
        try:
            if self._memory is not None:
                backend.register(self._memory)
        except BaseException:
            backend.close()
            raise
        return backend

    def _lanes_for(self, command: Any) -> Sequence[Lane]:
        if isinstance(command, LoadBlocks):
            return (self._loads,)
        return (self._stores,) if isinstance(command, StoreBlocks) else (self._loads, self._stores)

    def _load(self, backend: StorageBackend, command: LoadBlocks) -> RankDone:
        start = time.perf_counter()
        keys, buffers = self._values(command)
        arrived = backend.get(keys, buffers)
        damaged = []
        for number in range(arrived):
            if not is_sealed(buffers[number], keys[number], namespace=backend.namespace_digest):
                damaged.append(number)
            _let_others_run()
        num_good = damaged[0] if damaged else arrived
        if damaged:
            logger.warning("checksum mismatch in stored block %s: ignored, it will be recomputed", keys[num_good])
            backend.remove_damaged([keys[number] for number in damaged])
        self._refilled(command.slots[:num_good])
        seconds = time.perf_counter() - start
        num_bytes = sum(map(len, buffers[:num_good]))
        return RankDone(self._rank, LoadDone(command.load_id, num_good, num_good < arrived, num_bytes, seconds))

    def _store(self, backend: StorageBackend, command: StoreBlocks) -> RankDone:
        start = time.perf_counter()
        keys, buffers = self._values(command)
        for key, buffer in zip(keys, buffers, strict=True):
            seal(buffer, key, namespace=backend.namespace_digest)
            _let_others_run()
        refused = 0
        try:
            written = backend.put(keys, buffers)
        except StorageFullError as full:
            written, refused = full.num_written, full.num_refused
        seconds = time.perf_counter() - start
        num_bytes = written * len(buffers[0])
        return RankDone(self._rank, StoreDone(command.store_id, written, num_bytes, seconds, num_refused=refused))

    def _values(self, command: LoadBlocks | StoreBlocks) -> tuple[list[StoreKey], list[memoryview]]:
        keys = [block_key(block, self._rank) for block in command.hashes]
        return keys, [self._slot(slot) for slot in command.slots]


def _let_others_run() -> None:
    """A checksum keeps the interpreter to itself, 0.1 ms per MiB: the thread that computes waits for one at most."""
    time.sleep(0)


def _no_slot(slot: int) -> memoryview:
    raise StorageError(f"host slot {slot} has no memory yet")
