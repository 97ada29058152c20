"""MooncakeClient: Mooncake's own client in a process of its own, with deadlines, and errors as exceptions."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

from ...errors import ConfigError, StorageError
from ...forks import closed_in_children
from ..base import SlotMemory
from .process import MappedMemory, Start
from .settings import MooncakeSettings, largest_registration

__all__ = ["MooncakeClient", "error_text"]

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
"""Deadlines of the client, and less noise, where the user says nothing else."""

START_TIMEOUT_S = 20.0
REGISTERED_BYTES_PER_S = 500e6
"""Of memory, which the NIC's driver pins: the time for it is added."""
CALL_TIMEOUT_S = 10.0
"""The client's own deadlines are shorter; this one is kept whatever it does."""
LEAVE_TIMEOUT_S = 5.0

ERRORS = {
    -101: "no segment",
    -200: "no room",
    -600: "wrong parameters",
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


class MooncakeClient:
    """One connection to the store. Any thread may call it; calls wait for each other.

    A call that raises ends the process, so nothing of it goes on; what comes after it raises, too.
    """

    def __init__(
        self,
        settings: MooncakeSettings,
        *,
        segment_bytes: int = 0,
        memories: Sequence[SlotMemory] = (),
    ) -> None:
        """Connects, registers `memories`, which have files, and gives `segment_bytes` of the process to the store until
        `close`.

        Raises `ConfigError` when the package cannot be loaded, `StorageError` when the master does not answer.
        """
        self._lock = threading.Lock()
        self._leaves = bool(segment_bytes)
        hostname = settings.hostname
        self._connection, theirs = Pipe()
        closed_in_children(self._connection)
        environment = {**ENVIRONMENT, "MC_TCP_BIND_ADDRESS": _without_port(hostname), **os.environ}
        mapped, kept = [], [theirs.fileno()]
        for memory in memories:
            assert memory.file is not None, "memory that no other process can map"
            mapped.append(MappedMemory(memory.file, len(memory.view), _largest_registration(memory)))
            kept += [memory.file] if memory.life is None else [memory.file, memory.life]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=kept,
                env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=self._leaves,  # else it is killed with the process group of who uses it
            )
        setup = (
            hostname,
            settings.metadata_server,
            segment_bytes,
            settings.local_buffer_size,
            settings.protocol,
            settings.devices,
            settings.master_server_addr,
        )
        timeout_s = START_TIMEOUT_S + sum(each.num_bytes for each in mapped) / REGISTERED_BYTES_PER_S
        refusal = self._exchange(Start(setup, mapped, leaves=self._leaves), timeout_s)
        if refusal:
            self.close()
            raise _refused(refusal, settings)

    def exist(self, keys: Sequence[str]) -> list[int]:
        """For each key 1, 0, or an error below 0; in one round trip. What exists counts as used."""
        results: list[int] = self._call("exist", keys)
        return results

    def get(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Values to places in the registered memories, counted as if one followed the other. For each key its bytes, or
        an error below 0.
        """
        results: list[int] = self._call("get", keys, offsets, sizes)
        return results

    def get_bytes(self, keys: Sequence[str], sizes: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """As `get`, to where no memory is registered: values of `sizes` bytes at most."""
        results: tuple[list[int], list[bytes]] = self._call("get_bytes", keys, sizes)
        return results

    def put(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """For each key 0, 1 where it is stored already, or an error below 0."""
        results: list[int] = self._call("put", keys, offsets, sizes)
        return results

    def put_bytes(self, keys: Sequence[str], values: Sequence[bytes]) -> list[int]:
        """As `put`, from where no memory is registered."""
        results: list[int] = self._call("put_bytes", keys, values)
        return results

    def remove(self, keys: Sequence[str]) -> list[int]:
        """For each key 0, or an error below 0. Does not wait until a reader has ended."""
        results: list[int] = self._call("remove", keys)
        return results

    def wait(self) -> None:
        """Until the process has ended, for whatever reason."""
        self._process.wait()

    def close(self) -> None:
        """When this returns, nothing runs any more, and no byte can arrive in the memory. Idempotent.

        A process that gives memory leaves the store in order, if it can within 5 s.
        """
        self._connection.close()
        if self._leaves:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_TIMEOUT_S)
        self._process.kill()
        self._process.wait()

    def _call(self, name: str, *arguments: Sequence[Any]) -> Any:
        with self._lock:
            return self._exchange((name, *arguments), CALL_TIMEOUT_S)

    def _exchange(self, message: object, timeout_s: float) -> Any:
        try:
            self._connection.send(message)
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            self.close()
            raise StorageError("the process of mooncake's client has ended") from None
        self.close()
        raise StorageError(f"mooncake's client did not answer for {timeout_s:.0f} s, and was ended")


def _largest_registration(memory: SlotMemory) -> int:
    """What is registered as one ends where a slot ends."""
    return max(1, largest_registration(os.environ) // memory.slot_bytes) * memory.slot_bytes


def _without_port(hostname: str) -> str:
    return hostname.partition(":")[0] if hostname.count(":") == 1 else hostname  # more of them: an IPv6 address


def error_text(code: int) -> str:
    return f"{ERRORS.get(code, 'error')} ({code})"


def _refused(refusal: tuple[Any, ...], settings: MooncakeSettings) -> ConfigError | StorageError:
    what, why, *name = refusal
    if what == "import" and name[0] in ("mooncake", "mooncake.store") and why.startswith("No module"):
        return ConfigError(
            f"the storage backend mooncake needs a package: pip install '{PACKAGE}-non-cuda>=0.3.12.post1' "
            f"(with a GPU '{PACKAGE}>=0.3.12.post1')"
        )
    if what == "import":
        return ConfigError(f"mooncake cannot be loaded ({why}): apt-get install {LIBRARIES}")
    return StorageError(
        f"cannot connect to mooncake's master {settings.master_server_addr} over {settings.protocol}: "
        f"{what} says {error_text(why)}"
    )
