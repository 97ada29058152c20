"""MooncakeBackend: blocks in the memory of all machines of a Mooncake cluster. A master knows what lies where."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Sequence

from ...errors import StorageError
from ..base import StorageBackend, StorageFullError, StorageUsage, StoreKey
from ..namespace import Namespace
from .client import MooncakeClient, error_text
from .settings import MooncakeSettings, largest_registration
from .share import give_memory

__all__ = ["MooncakeBackend"]

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 1024
"""Values of one transfer. Mooncake queues so many per peer, lets as many wait for a second, and fails the rest."""

NO_ROOM, INVALID_PARAMETERS = -200, -600
MISSES = {-702, -703, -704, -707}
"""Of a get: no replica, not ready, not stored, lease expired. No transfer of these is under way."""


class MooncakeBackend(StorageBackend):
    """Keys are `<digest of the namespace>.<key>`. A process that registers memory gives some to the store, too."""

    name = "mooncake"
    may_write_late = True  # measured: of a get that failed 936 of 1,024 blocks arrived later

    def __init__(
        self, settings: MooncakeSettings, namespace: Namespace, *, rank: int = 0, gives_memory: bool = True
    ) -> None:
        """Connects. Raises `ConfigError` when the package cannot be used, `StorageError` when the master is away."""
        self._gives_memory = gives_memory
        self._settings = settings
        self._rank = rank
        self._prefix = f"{namespace.digest}."
        self._has_memory = False
        self._client = MooncakeClient(settings, rank=rank)

    def register(self, memory: memoryview, slot_bytes: int) -> None:
        if self._gives_memory:
            give_memory(self._settings, self._rank)
        begin = _address(memory)
        chunk = max(1, largest_registration(os.environ) // slot_bytes) * slot_bytes
        for offset in range(0, len(memory), chunk):
            self._client.register(begin + offset, min(chunk, len(memory) - offset))
        self._has_memory = True

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
        found = self._exist(keys)
        missing = [pair for pair, there in zip(zip(keys, buffers, strict=True), found, strict=True) if not there]
        written = 0
        for begin in range(0, len(missing), MOST_AT_ONCE):
            results = self._put(missing[begin : begin + MOST_AT_ONCE])
            for result in results:
                if result not in (0, NO_ROOM):
                    raise StorageError(f"mooncake cannot store {len(missing)} values: {error_text(result)}")
            written += results.count(0)
        if written < len(missing):
            raise StorageFullError(written, len(missing) - written)
        return written

    def touch(self, keys: Sequence[StoreKey]) -> None:
        self._exist(keys)  # which counts as a use

    def remove(self, keys: Sequence[StoreKey]) -> None:
        for result in self._client.remove(self._names(keys)):
            if result < 0 and result not in MISSES:
                raise StorageError(f"mooncake cannot forget {len(keys)} values: {error_text(result)}")

    def usage(self) -> StorageUsage:
        raise StorageError("mooncake's client does not know what is stored: see the metrics of its master")

    def close(self) -> None:
        self._client.close()

    def _names(self, keys: Sequence[StoreKey]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _exist(self, keys: Sequence[StoreKey]) -> list[int]:
        if not keys:
            return []
        found = self._client.exist(self._names(keys))
        for result in found:
            if result < 0:
                raise StorageError(f"mooncake cannot look up {len(keys)} values: {error_text(result)}")
        return found

    def _get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        sizes = [len(buffer) for buffer in buffers]
        results = self._client.get_into(self._names(keys), [_address(buffer) for buffer in buffers], sizes)
        for result in results:  # all of them: what follows a miss may be under way
            if result < 0 and result not in MISSES and result != INVALID_PARAMETERS:
                raise StorageError(f"mooncake cannot load {len(keys)} values: {error_text(result)}")
        for number, (key, size, result) in enumerate(zip(keys, sizes, results, strict=True)):
            if result != size:
                if result not in MISSES:
                    self._forget_damaged(key)
                return number
        return len(keys)

    def _forget_damaged(self, key: StoreKey) -> None:
        """A value of a wrong size would count as stored for ever."""
        logger.warning("block %s has another size than a block: forgotten", key)
        with contextlib.suppress(StorageError):
            self.remove([key])

    def _put(self, values: Sequence[tuple[StoreKey, memoryview]]) -> list[int]:
        names = self._names([key for key, _ in values])
        if not self._has_memory:
            return [self._client.put(name, buffer) for name, (_, buffer) in zip(names, values, strict=True)]
        addresses = [_address(buffer) for _, buffer in values]
        return self._client.put_from(names, addresses, [len(buffer) for _, buffer in values])


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
