"""Rates of the `mooncake` store over Mooncake's own client, for the same batches over TCP on one machine.
The store's client runs in a process of its own and looks keys up before it stores; ratios are medians of single turns.

A master on the loopback interface gets 1 GiB of memory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from _support import begin, median, sized

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.storage.base import SlotMemory, StoreKey
from fastdeploy_kvcache_v1.storage.mooncake.client import ENVIRONMENT
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from fastdeploy_kvcache_v1.storage.mooncake.share import give_memory, take_back_memory
from fastdeploy_kvcache_v1.storage.namespace import Namespace, block_key
from fastdeploy_kvcache_v1.worker import ops

BLOCK_SIZES = sized((128 << 10, 1 << 20, 3 << 20), (128 << 10,))
BATCH_BLOCKS = 32
COUNTED_KEYS = sized(2048, 64)
TURNS = sized(15, 1)


class Direct:
    """Mooncake's client, used as in its documentation."""

    def __init__(self, settings: MooncakeSettings, address: int, num_bytes: int) -> None:
        self.store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        local, master = settings.hostname, settings.master_server_addr
        assert self.store.setup(local, settings.metadata_server, 0, 1 << 20, "tcp", "", master) == 0
        assert self.store.register_buffer(address, num_bytes) == 0
        self.address = address

    def places(self, count: int, size: int) -> tuple[list[int], list[int]]:
        return [self.address + number * size for number in range(count)], [size] * count


def keys_of(turn: int, count: int) -> list[StoreKey]:
    names = (f"{turn} {number}".encode() for number in range(count))
    return [block_key(BlockHash(hashlib.sha256(name).digest()), 0) for name in names]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(backend: MooncakeBackend, direct: Direct, view: memoryview, size: int) -> dict[str, Any]:
    buffers = [view[number * size : (number + 1) * size] for number in range(BATCH_BLOCKS)]
    places = direct.places(BATCH_BLOCKS, size)
    ours: dict[str, list[float]] = {"put": [], "get": []}
    theirs: dict[str, list[float]] = {"put": [], "get": []}
    for turn in range(TURNS + 1):
        keys = keys_of(size + turn, BATCH_BLOCKS)
        names = [f"direct.{key}" for key in keys]
        took = [
            seconds(lambda keys=keys: backend.put(keys, buffers)),
            seconds(lambda keys=keys: backend.get(keys, buffers)),
        ]
        took_direct = [
            seconds(lambda names=names: direct.store.batch_put_from(names, *places)),
            seconds(lambda names=names: direct.store.batch_get_into(names, *places)),
        ]
        assert backend.count_stored(keys) == BATCH_BLOCKS
        assert set(direct.store.batch_is_exist(names)) == {1}
        backend.remove(keys)
        direct.store.batch_remove(names, True)
        if turn:  # the first one warms up
            for name, own, other in zip(ours, took, took_direct, strict=True):
                ours[name].append(own)
                theirs[name].append(other)
    whole = BATCH_BLOCKS * size
    return {
        "block_bytes": size,
        "direct_gb_per_s": {name: whole / median(times) / 1e9 for name, times in theirs.items()},
        "over_direct": {
            name: median(other / own for own, other in zip(ours[name], theirs[name], strict=True)) for name in ours
        },
    }


def question(backend: MooncakeBackend, direct: Direct) -> dict[str, float]:
    keys = keys_of(0, COUNTED_KEYS)
    ours = [1e3 * seconds(lambda: backend.count_stored(keys)) for _ in range(TURNS)]
    theirs = [1e3 * seconds(lambda: direct.store.batch_is_exist(keys)) for _ in range(TURNS)]
    return {"ours_ms": median(ours), "direct_ms": median(theirs)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    run = begin()
    os.environ.update(ENVIRONMENT, MC_TCP_BIND_ADDRESS="127.0.0.1")
    port = free_port()
    program = Path(sys.executable).with_name("mooncake_master")
    flags = ["-rpc_address=127.0.0.1", f"-rpc_port={port}", f"-metrics_port={free_port()}"]
    master = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    settings = MooncakeSettings("P2PHANDSHAKE", f"127.0.0.1:{port}", protocol="tcp")
    layout = CacheLayout(1, (RoleSpec("key", (1, 64, 1), "float16"),))
    namespace = Namespace("benchmark", "0", layout, 64, 1, "benchmark", "1")
    memory = ops.host_alloc(BATCH_BLOCKS * max(BLOCK_SIZES), shared=True)
    memory.array[:] = 1
    view = memory.array.data
    try:
        time.sleep(1.0)
        give_memory(settings, settings.global_segment_size)
        time.sleep(1.0)
        direct = Direct(settings, memory.address, memory.nbytes)
        with closing(MooncakeBackend(settings, namespace)) as backend:
            backend.register(SlotMemory(view, max(BLOCK_SIZES), memory.file))
            result = {
                "version": importlib.metadata.version("mooncake-transfer-engine-non-cuda"),
                "blocks_per_batch": BATCH_BLOCKS,
                "turns": TURNS,
                "cases": [measure(backend, direct, view, size) for size in BLOCK_SIZES],
                "question_keys": COUNTED_KEYS,
                "question": question(backend, direct),
            }
        direct.store.close()
        take_back_memory()
    finally:
        master.kill()
        master.wait()
    run.save(result)


if __name__ == "__main__":
    main()
