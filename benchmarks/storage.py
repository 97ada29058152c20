"""Rates of the `file` store, and of LMDB where it is installed, over plain reads and writes of one big file.
Blocks carry checksums, everything stays in the page cache, nothing is synced, and ratios are medians of single turns.

A new directory in DIRECTORY (default: `build/`) holds at most 1.5 GiB and is deleted at the end. No file is deleted
before: ext4 without a journal avoids inodes of deleted files for minutes, and examines them at each new file.
`create_file_us`, the time to create an empty file, shows how much of that other programs have caused.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from _support import ROOT, begin, median, sized

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.storage.base import StoreKey
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.namespace import Namespace, block_key
from fastdeploy_kvcache_v1.storage.seal import TRAILER_BYTES, is_sealed, seal
from fastdeploy_kvcache_v1.worker import ops

try:
    import lmdb
except ImportError:
    lmdb = None

BLOCK_SIZES = sized((128 << 10, 1 << 20, 3 << 20, 8 << 20), (128 << 10,))
BATCH_BLOCKS = 32
"""Blocks that `Fetches` and `Stores` move at once."""

COUNTED_KEYS = sized(2048, 64)
CREATED = 8
TURNS = sized(15, 1)
UNLIMITED = 1 << 50
"""No limit: values that `remove` moved away still count as stored."""

SEALED_FOR = "0" * 32
"""Digest of a namespace."""

LMDB_BYTES = 2 << 30
PAGE = 4096

Buffers = Sequence[memoryview]


class Store(ABC):
    """One batch of values, whose keys never change."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the batch, so that `put` stores it anew. Not timed."""

    def age(self) -> None:  # noqa: B027 (most stores mark nothing)
        """Make values look old, because a `get` soon after `put` does not mark them as used. Not timed."""

    @abstractmethod
    def put(self, buffers: Buffers) -> None: ...

    @abstractmethod
    def get(self, buffers: Buffers) -> None: ...


class Plain(Store):
    """One big file, a system call per block. Each value begins at a page, as in a file of its own."""

    def __init__(self, file: int) -> None:
        self.file = file

    def remove(self) -> None:
        os.ftruncate(self.file, 0)

    def put(self, buffers: Buffers) -> None:
        for number, buffer in enumerate(buffers):
            os.pwrite(self.file, buffer, number * _pitch(buffer))

    def get(self, buffers: Buffers) -> None:
        for number, buffer in enumerate(buffers):
            os.preadv(self.file, [buffer], number * _pitch(buffer))


class Overwritten(Plain):
    """`Plain` into pages that the file has already. A store cannot do that to values that others read."""

    def remove(self) -> None:
        pass


class Files(Store):
    def __init__(self, backend: FileBackend, keys: Sequence[StoreKey], removed: Path) -> None:
        self.backend = backend
        self.keys = keys
        self.removed = removed
        self.numbers = itertools.count()

    def remove(self) -> None:
        """Move files away: their inodes stay, see the module's docstring."""
        for path in self.paths():
            os.truncate(path, 0)
            path.rename(self.removed / str(next(self.numbers)))

    def age(self) -> None:
        then = time.time() - 3600
        for path in self.paths():
            os.utime(path, (then, then))

    def paths(self) -> list[Path]:
        return list(self.backend.directory.glob("*/??/*"))

    def put(self, buffers: Buffers) -> None:
        assert self.backend.put(self.keys, buffers) == len(self.keys)

    def get(self, buffers: Buffers) -> None:
        assert self.backend.get(self.keys, buffers) == len(self.keys)


class Lmdb(Store):
    """A transaction per batch. A value is copied once, from the map into its buffer.

    Later puts use the pages that `remove` frees, so they are warm.
    """

    def __init__(self, environment: Any, keys: Sequence[StoreKey]) -> None:
        self.environment = environment
        self.keys = [key.encode() for key in keys]

    def remove(self) -> None:
        with self.environment.begin(write=True) as transaction:
            for key in self.keys:
                transaction.delete(key)

    def put(self, buffers: Buffers) -> None:
        with self.environment.begin(write=True) as transaction:
            for key, buffer in zip(self.keys, buffers, strict=True):
                assert transaction.put(key, buffer, overwrite=False)

    def get(self, buffers: Buffers) -> None:
        with self.environment.begin(buffers=True) as transaction:
            for key, buffer in zip(self.keys, buffers, strict=True):
                buffer[:] = transaction.get(key)


class Contender(NamedTuple):
    store: Store
    sealed_for: Sequence[StoreKey] = ()
    """Keys of the batch if blocks are sealed before `put` and checked after `get`, as the store process does it."""

    def put(self, buffers: Buffers) -> None:
        for buffer, key in zip(buffers, self.sealed_for, strict=False):
            seal(buffer, key, namespace=SEALED_FOR)
        self.store.put(buffers)

    def get(self, buffers: Buffers) -> None:
        self.store.get(buffers)
        pairs = zip(buffers, self.sealed_for, strict=False)
        assert all(is_sealed(buffer, key, namespace=SEALED_FOR) for buffer, key in pairs)


def keys_of(first: int, count: int) -> list[StoreKey]:
    numbers = range(first, first + count)
    return [block_key(BlockHash(hashlib.sha256(number.to_bytes(8, "big")).digest()), 0) for number in numbers]


def create(paths: Sequence[str]) -> None:
    for path in paths:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def _pitch(buffer: memoryview) -> int:
    return -(-len(buffer) // PAGE) * PAGE


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def new_backend(directory: Path) -> FileBackend:
    layout = CacheLayout(1, (RoleSpec("key", (1, 64, 1), "float16"),))
    namespace = Namespace("benchmark", "0", layout, 64, 1, "benchmark", "1")
    return FileBackend(directory / "files", namespace, capacity_bytes=UNLIMITED)


@contextmanager
def opened_lmdb(directory: Path) -> Iterator[Any]:
    """An LMDB environment whose files are deleted at the end."""
    with lmdb.open(str(directory / "lmdb"), map_size=LMDB_BYTES, sync=False, writemap=False) as environment:
        yield environment
    shutil.rmtree(directory / "lmdb")


@contextmanager
def opened_contenders(directory: Path) -> Iterator[dict[str, Contender]]:
    keys = keys_of(0, BATCH_BLOCKS)
    (directory / "removed").mkdir()
    with ExitStack() as stack:
        plain = stack.enter_context(tempfile.TemporaryFile(dir=directory)).fileno()
        files = Files(stack.enter_context(closing(new_backend(directory))), keys, directory / "removed")
        stack.callback(files.remove)
        contenders = {
            "plain": Contender(Plain(plain)),
            "overwriting": Contender(Overwritten(plain)),
            "files": Contender(files),
            "files, checksums": Contender(files, keys),
        }
        if lmdb is not None:
            database = Lmdb(stack.enter_context(opened_lmdb(directory)), keys)
            contenders |= {"lmdb": Contender(database), "lmdb, checksums": Contender(database, keys)}
        yield contenders


def measure(directory: Path, block_bytes: int) -> dict[str, Any]:
    """Rates of the plain file, and of the others as ratios to it."""
    value_bytes = block_bytes + TRAILER_BYTES
    memory = ops.host_alloc(BATCH_BLOCKS * value_bytes)
    memory.array[:] = 1
    whole = memoryview(memory.array)
    buffers = [whole[first : first + value_bytes] for first in range(0, len(whole), value_bytes)]
    creations: list[float] = []
    with opened_contenders(directory) as contenders:
        puts: dict[str, list[float]] = {name: [] for name in contenders}
        gets: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(TURNS + 1):
            empty = [f"{directory}/files/tmp/{turn}.{number}" for number in range(CREATED)]
            creations.append(_seconds(lambda empty=empty: create(empty)) / CREATED)
            for name, contender in contenders.items():
                contender.store.remove()
                put_s = _seconds(lambda contender=contender: contender.put(buffers))
                contender.store.age()
                get_s = _seconds(lambda contender=contender: contender.get(buffers))
                if turn:  # the first one warms up
                    puts[name].append(put_s)
                    gets[name].append(get_s)
    return {
        "block_bytes": block_bytes,
        "create_file_us": 1e6 * median(creations),
        "plain_gb_per_s": {
            "read": len(whole) / median(gets["plain"]) / 1e9,
            "write": len(whole) / median(puts["plain"]) / 1e9,
            "overwrite": len(whole) / median(puts["overwriting"]) / 1e9,
        },
        "get_over_plain": _ratios(gets),
        "put_over_plain": _ratios(puts),
    }


def _ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Rates over the plain rate, by contender."""
    plain = seconds["plain"]
    return {
        name: median(a / b for a, b in zip(plain, own, strict=True)) for name, own in seconds.items() if name != "plain"
    }


def count_stored_ms(directory: Path) -> dict[str, dict[str, float]]:
    """Milliseconds to look up `COUNTED_KEYS` keys of which all, the first half, or none are stored."""
    stored, other = keys_of(0, COUNTED_KEYS), keys_of(COUNTED_KEYS, COUNTED_KEYS)
    half = COUNTED_KEYS // 2
    asked = {"all": stored, "half": stored[:half] + other[half:], "none": other}
    expected = {"all": COUNTED_KEYS, "half": half, "none": 0}
    markers = [memoryview(bytearray(TRAILER_BYTES)) for _ in stored]
    with ExitStack() as stack:
        files = stack.enter_context(closing(new_backend(directory)))
        files.put(stored, markers)
        counts: dict[str, Callable[[Sequence[StoreKey]], int]] = {"files": files.count_stored}
        if lmdb is not None:
            environment = stack.enter_context(opened_lmdb(directory))
            Lmdb(environment, stored).put(markers)
            counts["lmdb"] = lambda keys: _count_in_lmdb(environment, keys)
        ms: dict[str, dict[str, list[float]]] = {store: {name: [] for name in asked} for store in counts}
        for _turn in range(TURNS):
            for store, count in counts.items():
                for name, keys in asked.items():
                    start = time.perf_counter()
                    found = count(keys)
                    ms[store][name].append(1e3 * (time.perf_counter() - start))
                    assert found == expected[name]
    return {store: {name: median(times) for name, times in cases.items()} for store, cases in ms.items()}


def _count_in_lmdb(environment: Any, keys: Sequence[StoreKey]) -> int:
    with environment.begin(buffers=True) as transaction:
        for number, key in enumerate(keys):
            if transaction.get(key.encode()) is None:
                return number
    return len(keys)


def file_system(directory: Path) -> str:
    mounts = [mount for mount in psutil.disk_partitions(all=True) if directory.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype


def main() -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "build", metavar="DIRECTORY")

    run = begin(configure=configure)
    parent = run.options.directory
    if parent == ROOT / "build":
        parent.mkdir(exist_ok=True)
    elif not parent.is_dir():
        sys.exit(f"error: {parent} is no directory: name an existing one")
    if lmdb is None:
        print("note: LMDB is left out, because the package lmdb is not installed", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="storage-benchmark-", dir=parent) as name:
        directories = [Path(name) / str(number) for number in range(len(BLOCK_SIZES) + 1)]
        for directory in directories:
            directory.mkdir()
        counted, *measured = directories
        result = {
            "file_system": file_system(counted.resolve()),
            "blocks_per_batch": BATCH_BLOCKS,
            "turns": TURNS,
            "lmdb": None if lmdb is None else lmdb.__version__,
            "counted_keys": COUNTED_KEYS,
            "count_stored_ms": count_stored_ms(counted),
            "cases": [measure(*case) for case in zip(measured, BLOCK_SIZES, strict=True)],
        }
    run.save(result)


if __name__ == "__main__":
    main()
