"""MooncakeClient: Mooncake's own client, with deadlines, errors as exceptions, and an end that cannot crash.

Mooncake's client crashes when it is used while it closes or afterwards, also by its own clean-up at the end of the
process. So calls and `close` exclude each other here, and the end of the process waits for calls, but not for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import ConfigError, StorageError
from .settings import MooncakeSettings

__all__ = ["MooncakeClient", "error_text"]

logger = logging.getLogger(__name__)

PACKAGE = "mooncake-transfer-engine"
LIBRARIES = "libibverbs1 libnuma1 libcurl4"

ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    # A peer that stands still is waited for value by value in each lane: for 32 values 5 s, with 4 lanes 19 s.
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Deadlines of the client, and less noise, where the user says nothing else. It reads them once."""

EXIT_TIMEOUT_S = 5.0
"""For calls that still run when the process ends."""

ERRORS = {
    -101: "no segment",
    -200: "no room",
    -702: "no valid replica",
    -703: "not ready yet",
    -704: "not stored",
    -706: "in use",
    -707: "its lease expired while it was read",
    -800: "the transfer failed",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
}
"""Mooncake's codes that are met here, in words."""

_open: weakref.WeakSet[MooncakeClient] = weakref.WeakSet()


class MooncakeClient:
    """One connection to the store. Any thread may call it, one at a time; `close` waits for the call that runs."""

    def __init__(self, settings: MooncakeSettings, *, segment_bytes: int = 0, rank: int = 0) -> None:
        """Connects, and gives `segment_bytes` of memory to the store until `close`.

        Raises `ConfigError` when the package cannot be loaded, `StorageError` when the master does not answer.
        """
        hostname = settings.hostname
        self._store: Any = _load(hostname).MooncakeDistributedStore()
        self._lock = threading.Lock()
        status = self._store.setup(
            hostname,
            settings.metadata_server,
            segment_bytes,
            settings.local_buffer_size,
            settings.protocol,
            settings.device_of(rank),
            settings.master_server_addr,
        )
        if status != 0:
            self._store.close()
            raise StorageError(
                f"cannot connect to mooncake's master {settings.master_server_addr} as {hostname} over "
                f"{settings.protocol}: {error_text(status)}"
            )
        _open.add(self)

    def register(self, address: int, num_bytes: int) -> None:
        """Values may be read from, and written to, this memory from here on. Raises `StorageError`."""
        with self._used() as store:
            status = store.register_buffer(address, num_bytes)
        if status != 0:
            raise StorageError(f"mooncake cannot register {num_bytes} bytes of memory: {error_text(status)}")

    def exist(self, keys: Sequence[str]) -> list[int]:
        """For each key 1, 0, or an error below 0; in one round trip. What exists counts as used."""
        with self._used() as store:
            return list(store.batch_is_exist(list(keys)))

    def get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """For each key its bytes, or an error below 0."""
        with self._used() as store:
            return list(store.batch_get_into(list(keys), list(addresses), list(sizes)))

    def put_from(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """For each key 0, also where it is stored already, or an error below 0."""
        with self._used() as store:
            return list(store.batch_put_from(list(keys), list(addresses), list(sizes)))

    def put(self, key: str, value: memoryview) -> int:
        """As `put_from` for one small value in memory that is not registered."""
        with self._used() as store:
            return int(store.put(key, value))

    def remove(self, keys: Sequence[str]) -> list[int]:
        """For each key 0, or an error below 0. Does not wait until a reader has ended."""
        with self._used() as store:
            return list(store.batch_remove(list(keys), True))

    def close(self, timeout_s: float = -1) -> bool:
        """Waits for the call that runs, at most `timeout_s` (-1: until its end), and disconnects. Idempotent.

        True if nothing of this client runs any more: no byte can arrive in registered memory.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            store, self._store = self._store, None
            if store is not None:
                store.close()
        finally:
            self._lock.release()
        _open.discard(self)
        return True

    @contextlib.contextmanager
    def _used(self) -> Iterator[Any]:
        with self._lock:
            if self._store is None:
                raise StorageError("the connection to mooncake is closed")
            yield self._store


def error_text(code: int) -> str:
    return f"{ERRORS.get(code, 'error')} ({code})"


def _load(hostname: str) -> Any:
    """The client's module. Raises `ConfigError` naming what to install."""
    for name, value in {**ENVIRONMENT, "MC_TCP_BIND_ADDRESS": hostname.partition(":")[0]}.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        raise ConfigError(
            f"the storage backend mooncake needs a package: pip install '{PACKAGE}-non-cuda>=0.3.12.post1' "
            f"(with a GPU '{PACKAGE}>=0.3.12.post1')"
        ) from None
    except ImportError as error:
        raise ConfigError(f"mooncake cannot be loaded ({error}): apt-get install {LIBRARIES}") from None


def _close_all() -> None:
    """Before Mooncake's own clean-up, which does not wait for calls."""
    for client in list(_open):
        if not client.close(EXIT_TIMEOUT_S):
            logger.warning("mooncake hangs: the process ends without it")
            logging.shutdown()
            os._exit(1)


atexit.register(_close_all)
