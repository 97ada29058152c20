"""The values in a storage directory (`directory.py`): which there are, and how they are deleted.

Any file and any directory may appear or vanish meanwhile. What a symbolic link leads to is neither listed nor deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .directory import FUTURE_S, MANIFEST
from .shard_sizes import POLL_S, ShardSizes

__all__ = [
    "PAGE",
    "StoredFile",
    "delete_files",
    "list_shard",
    "namespaces",
    "on_disk",
    "remove_if_empty",
    "shards",
    "stored_files",
]

PAGE = 4096

SLICE = 32
"""Values that are deleted under one lock, in some milliseconds."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")


class StoredFile(NamedTuple):
    """One value as a directory listing shows it."""

    used_ns: int
    """When it was used last. 0 if that is in the future: it was not used since the clock was set right."""
    num_bytes: int
    """On the disk."""
    path: str

    @property
    def namespace(self) -> str:
        """Digest of the namespace it is in."""
        return self.path.rsplit(os.sep, 3)[1]

    @property
    def shard(self) -> str:
        return self.path.rsplit(os.sep, 2)[1]


def namespaces(directory: Path) -> list[Path]:
    """The directory of each namespace, in the order of their digests."""
    return sorted(Path(path) for path in _directories(directory, _NAMESPACE))


def shards(directory: Path, sizes: ShardSizes) -> list[str]:
    """Shards with a directory in any namespace, or with bytes that must be counted anew."""
    paths = (path for namespace in namespaces(directory) for path in _directories(namespace, _SHARD))
    return sorted({*map(os.path.basename, paths), *sizes.filled()})


def stored_files(directory: Path) -> Iterator[StoredFile]:
    """Every value of every namespace in `directory`; O(values)."""
    for namespace in namespaces(directory):
        yield from values_of(namespace)


def values_of(namespace: Path) -> Iterator[StoredFile]:
    """Every value in the directory of one namespace."""
    for shard in _directories(namespace, _SHARD):
        yield from _values_in(shard)


def _directories(parent: Path, name: re.Pattern[str]) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield entry.path


def list_shard(directory: Path, shard: str, sizes: ShardSizes) -> list[StoredFile]:
    """Every value of a shard, in all namespaces, without a lock. Corrects its number of bytes."""
    changes = sizes.changes(shard)
    found = _directories(directory, _NAMESPACE)
    files = [file for namespace in found for file in _values_in(f"{namespace}{os.sep}{shard}")]
    sizes.count(shard, sum(file.num_bytes for file in files), changes)
    return files


def _values_in(shard: str) -> Iterator[StoredFile]:
    future_ns = time.time_ns() + int(FUTURE_S * 1e9)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.islink(shard):
            return
        with os.scandir(shard) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    used_ns = status.st_mtime_ns if status.st_mtime_ns <= future_ns else 0
                    yield StoredFile(used_ns, on_disk(status.st_size), entry.path)


def on_disk(num_bytes: int) -> int:
    """What a file of `num_bytes` occupies."""
    return -(-num_bytes // PAGE) * PAGE


def delete_files(files: Sequence[StoredFile], sizes: ShardSizes) -> None:
    """In slices, so that no server waits long for the lock. Raises `OSError`."""
    for first in range(0, len(files), SLICE):
        if first:
            time.sleep(2 * POLL_S)  # who waits for the lock gets it
        with sizes.exclusive():
            for file in files[first : first + SLICE]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
                    sizes.add(file.shard, -file.num_bytes)


def remove_if_empty(namespace: Path) -> bool:
    """Remove the directory of a namespace that holds no value; True if it is gone. Raises `OSError`.

    A server makes it again. The caller has locked the sizes of the storage directory, or is the only one who uses
    this namespace.
    """
    for shard in _directories(namespace, _SHARD):
        with contextlib.suppress(OSError):  # a value is in it
            os.rmdir(shard)
    try:
        if not set(os.listdir(namespace)) <= {MANIFEST}:
            return False
        (namespace / MANIFEST).unlink(missing_ok=True)
        namespace.rmdir()
    except FileNotFoundError:
        pass
    return True
