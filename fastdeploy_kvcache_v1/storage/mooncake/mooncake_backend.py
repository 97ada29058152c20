"""MooncakeBackend: blocks in the memory of all machines of a Mooncake cluster. A master knows what lies where."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Sequence

from ...errors import StorageError
from ..base import SlotMemory, StorageBackend, StorageFullError, StoreKey
from ..namespace import Namespace
from .client import MooncakeClient, error_text
from .settings import MooncakeSettings

__all__ = ["MooncakeBackend"]

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 1024
"""Values of one transfer. Mooncake queues so many per peer, lets as many wait for a second, and fails the rest."""

NO_ROOM, INVALID_PARAMETERS = -200, -600
MISSES = {-702, -703, -704, -707}
"""Of a get: no replica, not ready, not stored, lease expired. No transfer of these is under way."""


class MooncakeBackend(StorageBackend):
    """Keys are `<digest of the namespace>.<key>`."""

    name = "mooncake"
    may_write_late = True  # measured: of a get that failed, 936 of 1,024 blocks arrived later

    def __init__(self, settings: MooncakeSettings, namespace: Namespace) -> None:
        """Connects at the first call, once it is known which memory there is. That raises `ConfigError` when the
        package cannot be used, and `StorageError` when the master is away.
        """
        self._settings = settings
        self.namespace_digest = namespace.digest
        self._prefix = f"{self.namespace_digest}."
        self._memories: list[SlotMemory] = []
        self._begins: list[int] = []
        """Address of each memory."""
        self._client: MooncakeClient | None = None

    def register(self, memory: SlotMemory) -> None:
        if memory.file is not None:
            self._memories.append(memory)
            self._begins.append(_address(memory.view))

    def count_stored(self, keys: Sequence[StoreKey]) -> int:
        found = self._exist(keys)
        return next((number for number, there in enumerate(found) if not there), len(found))

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        arrived = 0
        for begin in range(0, len(keys), MOST_AT_ONCE):
            part, into = keys[begin : begin + MOST_AT_ONCE], buffers[begin : begin + MOST_AT_ONCE]
            count = self._get(part, into)
            arrived += count
            if count < len(part):
                break
        return arrived

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        results: list[int] = []
        for begin in range(0, len(keys), MOST_AT_ONCE):
            results += self._put(keys[begin : begin + MOST_AT_ONCE], buffers[begin : begin + MOST_AT_ONCE])
        written, refused = results.count(0), results.count(NO_ROOM)
        if refused:
            raise StorageFullError(written, refused)
        return written

    def touch(self, keys: Sequence[StoreKey]) -> None:
        self._exist(keys)  # which counts as a use

    def remove(self, keys: Sequence[StoreKey]) -> None:
        for result in self._connected().remove(self._names(keys)):
            if result < 0 and result not in MISSES:
                raise StorageError(f"mooncake cannot remove {len(keys)} values: {error_text(result)}")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> MooncakeClient:
        if self._client is None:
            self._client = MooncakeClient(self._settings, memories=self._memories)
        return self._client

    def _names(self, keys: Sequence[StoreKey]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _exist(self, keys: Sequence[StoreKey]) -> list[int]:
        if not keys:
            return []
        found = self._connected().exist(self._names(keys))
        for result in found:
            if result < 0:
                raise StorageError(f"mooncake cannot look up {len(keys)} values: {error_text(result)}")
        return found

    def _get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        results = self._move_in(keys, buffers)
        for result in results:  # all of them: what follows a miss may be under way
            if result < 0 and result not in MISSES and result != INVALID_PARAMETERS:
                raise StorageError(f"mooncake cannot load {len(keys)} values: {error_text(result)}")
        for number, (key, buffer, result) in enumerate(zip(keys, buffers, results, strict=True)):
            if result != len(buffer):
                if result not in MISSES:
                    self._forget_damaged(key)
                return number
        return len(keys)

    def _move_in(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[int]:
        names, sizes = self._names(keys), list(map(len, buffers))
        offsets = self._offsets(buffers)
        if offsets is not None:
            return self._connected().get(names, offsets, sizes)
        results, values = self._connected().get_bytes(names, sizes)
        for buffer, value in zip(buffers, values, strict=True):
            buffer[:] = value
        return results

    def _forget_damaged(self, key: StoreKey) -> None:
        """A value of a wrong size would count as stored for ever."""
        logger.warning("stored block %s has the wrong size: ignored, it will be recomputed", key)
        with contextlib.suppress(StorageError):
            self.remove([key])

    def _put(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> list[int]:
        names, offsets = self._names(keys), self._offsets(buffers)
        if offsets is not None:
            results = self._connected().put(names, offsets, list(map(len, buffers)))
        else:
            results = self._connected().put_bytes(names, list(map(bytes, buffers)))
        for result in results:
            if result < 0 and result != NO_ROOM:
                raise StorageError(f"mooncake cannot store {len(keys)} values: {error_text(result)}")
        return results

    def _offsets(self, buffers: Sequence[memoryview]) -> list[int] | None:
        """Where they lie in the memories that the client maps; None if one of them does not."""
        offsets = [self._offset(buffer) for buffer in buffers]
        found = [offset for offset in offsets if offset is not None]
        return found if len(found) == len(offsets) and self._memories else None

    def _offset(self, buffer: memoryview) -> int | None:
        address, before = _address(buffer), 0
        for memory, begin in zip(self._memories, self._begins, strict=True):
            if begin <= address <= begin + len(memory.view) - len(buffer):
                return before + address - begin
            before += len(memory.view)
        return None


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
