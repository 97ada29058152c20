"""The `file` store in a directory of a million values, which are sparse: lookups, a start, cold reads, and an eviction
of 1 % while another server stores.

A new directory in DIRECTORY (default: `build/`) needs a million inodes and is deleted at the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from _support import ROOT, begin, sized

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage.base import StoreKey
from fastdeploy_kvcache_v1.storage.file import eviction
from fastdeploy_kvcache_v1.storage.file.eviction import Eviction
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.file.shard_sizes import SHARDS, ShardSizes
from fastdeploy_kvcache_v1.storage.namespace import Namespace, block_key

NUM_VALUES = sized(1_000_000, 2_000)
VALUE_BYTES = 3 << 20
LOOKED_UP = sized(512, 64)
TURNS = sized(200, 3)
COLD_VALUES, COLD_TURNS = sized((32, 9), (4, 1))
EVICTED = NUM_VALUES // 100
CAPACITY = NUM_VALUES * VALUE_BYTES
NAMESPACE = Namespace("benchmark", "0", CacheLayout(1, (RoleSpec("key", (1, 64, 1), "float16"),)), 64, 1, "none", "1")


def opened(directory: Path, capacity_bytes: int = CAPACITY) -> FileBackend:
    return FileBackend(directory, NAMESPACE, capacity_bytes=capacity_bytes)


def fill(directory: Path) -> list[StoreKey]:
    """The first key is the oldest."""
    opened(directory).close()
    root, now = directory / NAMESPACE.digest, time.time()
    for shard in SHARDS:
        (root / shard).mkdir()
    keys = [block_key(BlockHash(random.randbytes(32)), 0) for _ in range(NUM_VALUES)]
    for number, key in enumerate(keys):
        file = os.open(f"{root}/{key[:2]}/{key}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(file, VALUE_BYTES)
        os.utime(file, (now - 1e6 + number / 10,) * 2)
        os.close(file)
    return keys


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def first_answer(directory: Path, keys: list[StoreKey]) -> None:
    with closing(opened(directory)) as backend:
        assert backend.count_stored(keys[:1]) == 1


def counted(directory: Path) -> tuple[float, int]:
    """After the loss of the sizes: seconds of the slowest put until all shards are counted, and the number of puts."""
    (directory / "used").unlink()
    with closing(opened(directory, 2 * CAPACITY)) as backend:
        times: list[float] = []
        while not times or backend._used.unknown():
            times.append(timed(lambda: backend.put([a_key()], [memoryview(bytearray(4096))])))
        assert backend._used.read() == CAPACITY + 4096 * len(times)
    return max(times), len(times)


def a_key() -> StoreKey:
    return block_key(BlockHash(os.urandom(32)), 0)


def store_meanwhile(directory: Path, begun: Event, ended: Event, queue: Any) -> None:
    """Another server, whose capacity is large enough."""
    times, failures, value = [], 0, memoryview(bytearray(4096))
    with closing(opened(directory, 2 * CAPACITY)) as backend:
        while not ended.is_set():
            try:
                times.append(timed(lambda: backend.put([a_key()], [value])))
            except StorageError:
                failures += 1
            begun.set()
            time.sleep(0.005)
    queue.put((len(times), failures, 1e3 * max(times)))


def cold_rates(directory: Path) -> dict[str, float]:
    """GB/s of values that the page cache lacks: in the order of their keys, and over plain reads of their files."""
    keys = [a_key() for _ in range(COLD_VALUES)]
    buffers = [memoryview(bytearray(os.urandom(VALUE_BYTES))) for _ in keys]
    took: dict[str, list[float]] = {"get": [], "plain": []}
    with closing(opened(directory, 2 * CAPACITY)) as backend:
        backend.put(keys, buffers)
        paths = [f"{directory}/{NAMESPACE.digest}/{key[:2]}/{key}" for key in keys]

        def read_plainly() -> None:
            for path, buffer in zip(paths, buffers, strict=True):
                with open(path, "rb", buffering=0) as file:
                    assert file.readinto(buffer) == VALUE_BYTES

        for _ in range(COLD_TURNS):
            drop_from_cache(paths)
            took["get"].append(timed(lambda: backend.get(keys, buffers)))
            drop_from_cache(paths)
            took["plain"].append(timed(read_plainly))
        backend.remove(keys)
    return {name: COLD_VALUES * VALUE_BYTES / float(np.median(seconds)) / 1e9 for name, seconds in took.items()}


def drop_from_cache(paths: list[str]) -> None:
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@contextmanager
def gaps() -> Iterator[list[float]]:
    """How late another thread of the process was, each time that it wanted to run."""
    late, ended = [], threading.Event()

    def tick() -> None:
        while not ended.is_set():
            late.append(timed(lambda: time.sleep(0.001)) - 0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    yield late
    ended.set()
    thread.join()


@contextmanager
def watched() -> Iterator[tuple[list[float], list[float]]]:
    """Seconds of each lock, and CPU seconds of each listing of a shard, which is without a lock."""
    listings: list[float] = []
    locks: list[float] = []
    list_shard, exclusive = eviction.list_shard, ShardSizes.exclusive

    def timed_listing(*given: Any) -> Any:
        start = time.thread_time()
        found = list_shard(*given)
        listings.append(time.thread_time() - start)
        return found

    @contextmanager
    def timed_lock(self: ShardSizes) -> Iterator[None]:
        with exclusive(self):
            start = time.perf_counter()
            yield
            locks.append(time.perf_counter() - start)

    eviction.list_shard = timed_listing  # type: ignore[assignment]
    ShardSizes.exclusive = timed_lock  # type: ignore[method-assign, assignment]
    try:
        yield listings, locks
    finally:
        eviction.list_shard, ShardSizes.exclusive = list_shard, exclusive  # type: ignore[method-assign]


def evict(directory: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    begun, ended, queue = context.Event(), context.Event(), context.Queue()
    other = context.Process(target=store_meanwhile, args=(directory, begun, ended, queue))
    other.start()
    begun.wait()
    sizes = ShardSizes(directory / "used")
    before = sizes.read()
    with closing(sizes), gaps() as late, watched() as (listings, locks):
        seconds = timed(lambda: Eviction(directory, before).make_room(sizes, EVICTED * VALUE_BYTES))
    evicted = (before - ShardSizes(directory / "used").read()) / VALUE_BYTES
    ended.set()
    puts, failures, slowest = queue.get()
    other.join()
    return {
        "evicted": round(evicted),
        "seconds": seconds,
        "longest_listing_ms": 1e3 * max(listings),
        "longest_lock_ms": 1e3 * max(locks),
        "longest_gap_ms": 1e3 * max(late),
        "puts_meanwhile": puts,
        "failed_puts": failures,
        "slowest_put_ms": slowest,
    }


def main() -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "build", metavar="DIRECTORY")

    run = begin(configure=configure)
    run.options.directory.mkdir(exist_ok=True)
    random.seed(1)
    with tempfile.TemporaryDirectory(prefix="storage-large-", dir=run.options.directory) as name:
        directory = Path(name) / "kv"
        keys = fill(directory)
        slowest_put, num_puts = counted(directory)
        lookups = []
        with closing(opened(directory)) as backend:
            for _ in range(TURNS):
                asked = random.sample(keys, LOOKED_UP)
                lookups.append(1e3 * timed(lambda asked=asked: backend.count_stored(asked)))
        run.save(
            {
                "values": NUM_VALUES,
                "value_bytes": VALUE_BYTES,
                "start_to_first_answer_s": timed(lambda: first_answer(directory, keys)),
                "counting": {"slowest_put_s": slowest_put, "puts": num_puts},
                "looked_up": LOOKED_UP,
                "lookup_ms": {"median": float(np.median(lookups)), "p99": float(np.percentile(lookups, 99))},
                "cold_gb_per_s": cold_rates(directory),
                "eviction": evict(directory),
            }
        )


if __name__ == "__main__":
    main()
