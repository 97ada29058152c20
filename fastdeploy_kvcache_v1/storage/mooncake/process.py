"""The process that Mooncake's client runs in: `python -m fastdeploy_kvcache_v1.storage.mooncake.process FD`.

Mooncake's client keeps the interpreter to itself while it connects and disconnects, for 16 s when its master is dead;
it waits up to a minute for a peer; it writes into memory after it has said that a read failed; and it crashes when it
is used while it closes. In a process of its own all that ends with the process, which can be killed at any moment.

Answers one call at a time over the socket FD, in order. Ends when the other end is closed.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import select
import signal
import sys
import threading
from bisect import bisect
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

__all__ = ["MappedMemory", "Start"]

Buffer = int | bytes | memoryview
"""An offset into the registered memory, or the bytes themselves."""


class MappedMemory(NamedTuple):
    """Memory that both processes map."""

    file: int
    num_bytes: int
    largest_registration: int
    """Bytes that are registered as one."""


class Start(NamedTuple):
    """The first message."""

    setup: tuple[Any, ...]
    """Arguments of the client's `setup`."""
    memories: Sequence[MappedMemory]
    leaves: bool
    """Whether the client is closed in the end. Without, the process ends at once."""


class _Failed(Exception):
    """A call of the client returned a code that is not 0."""


class _Client:
    def __init__(self, start: Start) -> None:
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        if (status := self._store.setup(*start.setup)) != 0:
            raise _Failed("setup", status)
        self._mappings: list[mmap.mmap] = []
        self._begins: list[int] = []
        """Offset of each memory."""
        self._bases: list[int] = []
        num_bytes = 0
        for memory in start.memories:
            self._begins.append(num_bytes)
            self._map(memory)
            num_bytes += memory.num_bytes

    def _map(self, memory: MappedMemory) -> None:
        self._mappings.append(mmap.mmap(memory.file, memory.num_bytes))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mappings[-1]))
        self._bases.append(base)
        for offset in range(0, memory.num_bytes, memory.largest_registration):
            num_bytes = min(memory.largest_registration, memory.num_bytes - offset)
            if (status := self._store.register_buffer(base + offset, num_bytes)) != 0:
                raise _Failed(f"registration of {num_bytes} bytes", status)

    def _address(self, offset: int) -> int:
        number = bisect(self._begins, offset) - 1
        return self._bases[number] + offset - self._begins[number]

    def exist(self, keys: list[str]) -> list[int]:
        return list(self._store.batch_is_exist(keys))

    def get(self, keys: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        return list(self._store.batch_get_into(keys, list(map(self._address, offsets)), sizes))

    def get_bytes(self, keys: list[str], sizes: list[int]) -> tuple[list[int], list[bytes]]:
        """As `get`, for memory that this process does not map."""
        buffers = [ctypes.create_string_buffer(size) for size in sizes]
        results = self._store.batch_get_into(keys, list(map(ctypes.addressof, buffers)), sizes)
        return list(results), [buffer.raw for buffer in buffers]

    def put(self, keys: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """1 for what is stored already: Mooncake would say 0."""
        results = self.exist(keys)
        missing = [number for number, there in enumerate(results) if there == 0]
        if missing:
            addresses = [self._address(offsets[number]) for number in missing]
            put = self._store.batch_put_from(
                [keys[number] for number in missing], addresses, [sizes[number] for number in missing]
            )
            for number, result in zip(missing, put, strict=True):
                results[number] = result
        return results

    def put_bytes(self, keys: list[str], values: Sequence[bytes]) -> list[int]:
        """As `put`, for memory that this process does not map."""
        found = self.exist(keys)
        return [there or int(self._store.put(*each)) for there, *each in zip(found, keys, values, strict=True)]

    def remove(self, keys: list[str]) -> list[int]:
        """Does not wait until a reader has ended."""
        return list(self._store.batch_remove(keys, True))

    def close(self) -> None:
        self._store.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os._exit(serve(Connection(int(sys.argv[1]))))  # Mooncake would close what is left, and takes seconds


def serve(connection: Connection) -> int:
    """Answers until the other end is closed. Returns the exit status of the process."""
    start: Start = connection.recv()
    if not start.leaves:
        threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    try:
        client = _Client(start)
    except (_Failed, ImportError) as error:
        connection.send(error.args if isinstance(error, _Failed) else ("import", str(error), error.name))
        return 1
    try:
        connection.send(())
        while True:
            name, *arguments = connection.recv()
            connection.send(getattr(client, name)(*arguments))
    except (EOFError, ConnectionError):
        if start.leaves:
            client.close()
    return 0


def _end_with(file: int) -> None:
    """End this process, whatever it does, when the other end of the socket is closed."""
    poller = select.poll()
    poller.register(file, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
