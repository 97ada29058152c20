"""The store process: `python -m fastdeploy_kvcache_v1.storage.child FD`.

Moves blocks between the store and the host slots of all ranks, whose memory it maps. The engine gives each slot to one
owner at a time, so nothing here is ordered with copies and compute. Killing this process ends every byte that moves.

    engine -- commands --> main thread --> questions | loads (several threads) | stores (niced) -- answers --> engine

Each lane takes its commands in order. Ends when the other end of the socket FD is closed, or with its parent thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..contract.messages import BlockHash
from ..errors import KVCacheError, StorageError
from ..link.messages import decoders_of, encode
from ..link.peer import Peer, inherited_socket
from .base import StorageBackend, StorageFullError
from .host_slots import HostSlots, Value, address_of, map_pages
from .messages import (
    Ending,
    LoadBlocks,
    LoadDone,
    QueryBlocks,
    QueryDone,
    RanksDiffer,
    Ready,
    Start,
    StoreBlocks,
    StoreDone,
    TouchBlocks,
    TouchDone,
    UseNamespace,
)
from .namespace import Namespace, block_key
from .seal import is_sealed, seal
from .settings import StorageSettings

logger = logging.getLogger(__name__)

STORE_NICENESS = 10
"""Of the thread that stores: it gives way to whatever serves requests."""

FIRST_QUESTION = block_key(BlockHash(bytes(32)), 0)

PR_SET_PDEATHSIG = 1


class Lane:
    """A thread that does one kind of work in order, over connections of its own."""

    def __init__(self, name: str, server: Server, work: Callable[[Any, Any], object], *, niceness: int = 0) -> None:
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.backends: list[StorageBackend] = []
        self._name = name
        self._server = server
        self._work = work
        self._niceness = niceness
        threading.Thread(target=self._run, name=f"kv-store-{name}", daemon=True).start()

    def _run(self) -> None:
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)  # on Linux, of a thread
        while True:
            command = self.commands.get()
            if isinstance(command, UseNamespace):
                self._connect(command.namespace)
            else:
                self._server.say(self._answer(command))

    def _connect(self, namespace: Namespace) -> None:
        try:
            for backend in self.backends:
                backend.close()
            self.backends = self._server.connect(namespace, self._name)
        except Exception as error:  # the edge of the process: another one tries again
            self._server.end(error)
        self._server.say(Ready(self._name))

    def _answer(self, command: Any) -> object:
        try:
            return self._work(self.backends, command)
        except Exception as error:  # the edge of the thread: this unit of work fails
            if self.backends[0].may_write_late and not isinstance(command, QueryBlocks | TouchBlocks):
                self._server.end(error)  # only then no byte can arrive any more
            return command.failed(_text(error))


class Server:
    """What the process does from its first message on."""

    def __init__(self, start: Start, engine: Peer) -> None:
        self._settings = StorageSettings(**start.settings)
        self._slots = HostSlots(start)
        threading.Thread(target=map_pages, args=(self._slots.memories,), name="kv-store-pages", daemon=True).start()
        self._engine = engine
        self._sending = threading.Lock()
        self._num_loading = self._settings.kind.load_threads
        self._threads = ThreadPoolExecutor(self._num_loading, "kv-store-load")
        self._questions = Lane("query", self, self._ask)
        self._loads = Lane("load", self, self._load)
        self._stores = Lane("store", self, self._store, niceness=STORE_NICENESS)

    def take(self, command: object) -> None:
        if isinstance(command, UseNamespace):
            for lane in (self._questions, self._loads, self._stores):
                lane.commands.put(command)
        elif isinstance(command, LoadBlocks):
            self._loads.commands.put(command)
        elif isinstance(command, StoreBlocks):
            self._stores.commands.put(command)
        else:
            self._questions.commands.put(command)

    def say(self, message: object) -> None:
        with self._sending:
            self._engine.outbox.put(encode(message))
            while self._engine.outbox:
                select.select([], [self._engine.socket], [])
                self._engine.flush()

    def end(self, error: Exception) -> None:
        """End the process, with every byte that moves. Does not return."""
        self.say(Ending(_text(error)))
        os._exit(1)

    def connect(self, namespace: Namespace, lane: str) -> list[StorageBackend]:
        """Return as many connections as `lane` uses at the same time."""
        connect = self._settings.kind.open
        assert connect is not None, "a store over the device tier has an agent of its own"
        namespace = replace(namespace, num_parts=self._slots.parts.num_parts)
        backends = []
        for _ in range(self._num_loading if lane == "load" else 1):
            backends.append(connect(self._settings, namespace))
            for memory in self._slots.memories:
                backends[-1].register(memory)
            backends[-1].count_stored([FIRST_QUESTION])  # a store may connect only now, which may take long
        return backends

    # ---- the lanes' work

    def _ask(self, backends: Sequence[StorageBackend], command: QueryBlocks | TouchBlocks) -> QueryDone | TouchDone:
        """Part 0 is stored last, so it says that a block is there."""
        start = time.perf_counter()
        (backend,) = backends
        if isinstance(command, TouchBlocks):
            parts = range(self._slots.parts.num_parts)
            backend.touch([block_key(block, part) for block in command.hashes for part in parts])
        num_stored = backend.count_stored([block_key(block, 0) for block in command.hashes])
        if isinstance(command, TouchBlocks):
            return TouchDone(command.touch_id, num_stored)
        return QueryDone(command.query_id, num_stored, time.perf_counter() - start)

    def _load(self, backends: Sequence[StorageBackend], command: LoadBlocks) -> LoadDone:
        """Each thread takes every n-th value, so all read at the front of the prefix."""
        start = time.perf_counter()
        num_parts = self._slots.parts.num_parts
        values = self._slots.values(command.hashes, command.slots, range(num_parts))
        stride = min(len(backends), len(values))
        futures = [self._threads.submit(_read, backends[at], values[at::stride]) for at in range(stride)]
        for future in futures:
            future.exception()  # no thread moves bytes any more
        damaged, end = [], len(values)
        for at, future in enumerate(futures):
            num_arrived, wrong = future.result()
            if num_arrived < len(values[at::stride]):
                end = min(end, at + stride * num_arrived)
            damaged += [at + stride * number for number in wrong]
        first = min([end, *damaged])
        num_blocks = first // num_parts
        if damaged:
            key = values[first].key
            logger.warning("checksum mismatch in stored block %s: ignored, it will be recomputed", key)
            backends[0].remove_damaged([values[number].key for number in damaged])
        if damaged or first % num_parts:  # a block without a part counts as missing, until it is stored again
            backends[0].remove([block_key(block, 0) for block in command.hashes[num_blocks:]])
        return LoadDone(
            command.load_id,
            num_blocks,
            first in damaged,
            sum(len(value.places[0]) for value in values[: num_blocks * num_parts]),
            time.perf_counter() - start,
        )

    def _store(self, backends: Sequence[StorageBackend], command: StoreBlocks) -> StoreDone:
        start = time.perf_counter()
        (backend,) = backends
        if self._slots.ranks_differ(command):
            self.say(RanksDiffer())
            raise StorageError("ranks that share a part of each block hold different bytes")
        written = refused = num_bytes = 0
        for parts in (range(1, self._slots.parts.num_parts), range(1)):
            values = self._slots.values(command.hashes, command.slots, parts)
            buffers = [value.places[0] for value in values]
            for value, buffer in zip(values, buffers, strict=True):
                seal(buffer, value.key, namespace=backend.namespace_digest)
            try:
                written = backend.put([value.key for value in values], buffers) if values else 0
            except StorageFullError as full:
                written, refused = full.num_written, min(full.num_refused, len(command.hashes))
            num_bytes += written * len(self._slots.place(0, 0))
            if refused:  # without all other parts, part 0 must not be there
                break
        written = min(written, len(command.hashes) - refused)
        return StoreDone(command.store_id, written, num_bytes, time.perf_counter() - start, num_refused=refused)


def _read(backend: StorageBackend, values: Sequence[Value]) -> tuple[int, list[int]]:
    """Returns how many values have arrived, and the numbers of those with wrong bytes. Good ones go to all holders."""
    num_arrived = backend.get([value.key for value in values], [value.places[0] for value in values])
    damaged = []
    for number, (key, (first, *others)) in enumerate(values[:num_arrived]):
        if not is_sealed(first, key, namespace=backend.namespace_digest):
            damaged.append(number)
        for other in others:
            ctypes.memmove(address_of(other), address_of(first), len(first))  # unlike a slice, it lets others run
    return num_arrived, damaged


def _text(error: Exception) -> str:
    if isinstance(error, KVCacheError):
        return str(error)
    logger.error("the store failed", exc_info=error)
    return repr(error)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # of the thread that started this process
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s store process: %(message)s")
    types = (Start, UseNamespace, QueryBlocks, LoadBlocks, StoreBlocks, TouchBlocks)
    engine = Peer(lambda: inherited_socket(int(sys.argv[1])), decoders_of(types))
    server: Server | None = None
    try:
        while True:
            select.select([engine.socket], [], [])
            engine.receive()
            for message in engine.messages():
                if server is None:
                    server = Server(message, engine)
                else:
                    server.take(message)
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
