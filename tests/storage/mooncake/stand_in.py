"""FAKE Mooncake: its client's module over a dictionary, and its client's process as a thread of this one."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_kvcache_v1.storage.mooncake import client, process, share
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings

SETTINGS = MooncakeSettings("P2PHANDSHAKE", "127.0.0.1:50051", "127.0.0.1:77", 1 << 20, protocol="tcp")
NOT_STORED, NO_ROOM, WRONG_SIZE = -704, -200, -600


def give_now(settings: MooncakeSettings) -> None:
    """Returns when the memory is there."""
    share.give_memory(settings, settings.global_segment_size)
    deadline = time.monotonic() + 30
    while share._given[settings].client is None:
        assert time.monotonic() < deadline, "the memory is not given"
        time.sleep(0.002)


class Cluster:
    """What the master and the clients of all machines know."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.room = 0
        self.lock = threading.Lock()
        """Of `room`: clients come and go at the same time."""
        self.setups: list[tuple[Any, ...]] = []
        self.registered: list[int] = []
        """Bytes of each registration."""
        self.refusals: dict[str, int] = {}
        """What a call says, if not what became of it."""
        self.environments: list[dict[str, str]] = []
        """Of each process."""
        self.fault: str | None = None
        """What a client does that is asked: it `hangs` until it is killed, or `ends`."""
        self.killed = threading.Event()
        """A process that was killed ends by itself, its connection is closed, unless it hangs."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = SimpleNamespace(MooncakeDistributedStore=lambda: _Store(self))
        monkeypatch.setitem(sys.modules, "mooncake.store", module)
        monkeypatch.setattr(client.subprocess, "Popen", self._start)
        monkeypatch.setattr(process, "_end_with", lambda file: None)

    def _start(self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **options: Any) -> Any:
        """A thread in the place of a process."""
        assert str(pass_fds[0]) == command[-1]
        self.environments.append(env)
        connection = Connection(os.dup(pass_fds[0]))

        def run() -> None:
            with connection:
                process.serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return SimpleNamespace(wait=thread.join, kill=self.killed.set)


class _Store:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._given = 0

    def setup(self, *arguments: Any) -> int:
        self._cluster.setups.append(arguments)
        refusal = self._cluster.refusals.get("setup", 0)
        self._given = 0 if refusal else arguments[2]
        with self._cluster.lock:
            self._cluster.room += self._given
        return refusal

    def register_buffer(self, address: int, num_bytes: int) -> int:
        self._cluster.registered.append(num_bytes)
        return self._cluster.refusals.get("register", 0)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        if self._cluster.fault == "hangs":
            self._cluster.killed.wait()
        if self._cluster.fault == "ends":
            raise EOFError
        return [self._cluster.refusals.get("exist", int(key in self._cluster.values)) for key in keys]

    def batch_get_into(self, keys: list[str], *places: list[int]) -> list[int]:
        return [self._get(key, *place) for key, *place in zip(keys, *places, strict=True)]

    def _get(self, key: str, address: int, size: int) -> int:
        value = self._cluster.values.get(key)
        if value is None or "get" in self._cluster.refusals:
            return self._cluster.refusals.get("get", NOT_STORED)
        if len(value) > size:
            return WRONG_SIZE
        ctypes.memmove(address, value, len(value))
        return len(value)

    def batch_put_from(self, keys: list[str], *places: list[int]) -> list[int]:
        return [self.put(key, ctypes.string_at(*place)) for key, *place in zip(keys, *places, strict=True)]

    def put(self, key: str, value: bytes) -> int:
        """Says 0 for what is stored already, too."""
        if sum(map(len, self._cluster.values.values())) + len(value) > self._cluster.room:
            return NO_ROOM
        self._cluster.values.setdefault(key, value)
        return self._cluster.refusals.get("put", 0)

    def batch_remove(self, keys: list[str], even_in_use: bool) -> list[int]:
        assert even_in_use
        found = [self._cluster.values.pop(key, None) for key in keys]
        return [self._cluster.refusals.get("remove", NOT_STORED if value is None else 0) for value in found]

    def close(self) -> None:
        with self._cluster.lock:
            self._cluster.room -= self._given
