"""LMCache's stores of files: `fs_native` and `fs`, two of its L2 adapters, and `local_disk`, its LocalDiskBackend.

They have their defaults: no O_DIRECT, and four threads in `fs_native` and `local_disk`. A value is a file in one
directory, without checksum and without fsync. L2 adapters write under another name, then rename. LocalDiskBackend
writes under the final one, and keeps its index in the process: a new process finds nothing.

Packages that LMCache imports and these stores never call are mocks. It tells nobody that it is used.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import torch
from file_store import FileStore

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import stubs

os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
stubs.install(
    "aiofile", "aiohttp", "cachetools", "cpuinfo", "cryptography", "llvmlite", "numba", "prometheus_client", "requests",
    "transformers", "zmq",
)  # fmt: skip

from lmcache import __version__  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig  # noqa: E402
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj  # noqa: E402
from lmcache.v1.platform import consume_fd  # noqa: E402
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: E402

CONFIGS = {"fs": FSL2AdapterConfig, "fs_native": FSNativeL2AdapterConfig}
MOST_GIB = 1 << 20
MODEL = "benchmark"


class LMCacheFiles(FileStore):
    version = __version__

    def held(self, buffers: Sequence[memoryview]) -> list[TensorMemoryObj]:
        return [memory_object(torch.frombuffer(buffer, dtype=torch.uint8)) for buffer in buffers]


def memory_object(tensor: torch.Tensor) -> TensorMemoryObj:
    about = MemoryObjMetadata(tensor.shape, tensor.dtype, 0, len(tensor), ref_count=1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(tensor, about, None)


class Adapter(LMCacheFiles):
    """Waits for each batch, as a caller does that needs it."""

    pattern = "*.data"

    def __init__(self, directory: Path, kind: str) -> None:
        self.adapter = create_l2_adapter(CONFIGS[kind].from_dict({"base_path": str(directory)}))

    def keys(self, hashes: Sequence[bytes]) -> list[ObjectKey]:
        return [ObjectKey(each, MODEL, 0) for each in hashes]

    def put(self, keys: list[ObjectKey], held: list[TensorMemoryObj]) -> None:
        task = self.adapter.submit_store_task(keys, held)
        wait(self.adapter.get_store_event_fd())
        assert self.adapter.pop_completed_store_tasks()[task].is_successful()

    def lookup(self, keys: list[ObjectKey]) -> int:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        wait(self.adapter.get_lookup_and_lock_event_fd())
        found = num_set(self.adapter.query_lookup_and_lock_result(task), len(keys))
        self.adapter.submit_unlock(keys)
        return found

    def get(self, keys: list[ObjectKey], held: list[TensorMemoryObj]) -> int:
        task = self.adapter.submit_load_task(keys, held)
        wait(self.adapter.get_load_event_fd())
        return num_set(self.adapter.query_load_result(task), len(keys))

    def close(self) -> None:
        self.adapter.close()


def wait(event: int) -> None:
    select.select([event], [], [])
    consume_fd(event)


def num_set(bitmap: Any, length: int) -> int:
    return sum(map(bitmap.test, range(length)))


class LocalDisk(LMCacheFiles):
    """It also stands for the backend that hands out memory, and hands out what `get` is given."""

    pattern = "*.pt"

    def __init__(self, directory: Path, kind: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        config = LMCacheEngineConfig.from_defaults(local_disk=str(directory), max_local_disk_size=MOST_GIB)
        self.backend = LocalDiskBackend(config, self.loop, self, "cpu")

    def allocate(self, *_: Any) -> TensorMemoryObj:
        return next(self.free)

    def keys(self, hashes: Sequence[bytes]) -> list[CacheEngineKey]:
        return [CacheEngineKey(MODEL, 1, 0, int.from_bytes(each, "big"), torch.uint8) for each in hashes]

    def put(self, keys: list[CacheEngineKey], held: list[TensorMemoryObj]) -> None:
        written = Semaphore(0)
        self.backend.batched_submit_put_task(keys, held, on_complete_callback=lambda _: written.release())
        for _ in keys:
            written.acquire()

    def lookup(self, keys: list[CacheEngineKey]) -> int:
        return sum(map(self.backend.contains, keys))

    def get(self, keys: list[CacheEngineKey], held: list[TensorMemoryObj]) -> int:
        self.free = iter(held)
        return sum(each is not None for each in self.backend.batched_get_blocking(keys))

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def CONTENDER(directory: Path, kind: str) -> FileStore:
    return (LocalDisk if kind == "local_disk" else Adapter)(directory, kind)
