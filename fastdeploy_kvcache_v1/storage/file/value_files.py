"""The values in a storage directory (`directory.py`): which there are, and how they are deleted.

Any file and any directory may appear or vanish meanwhile. What a symbolic link leads to is neither listed nor deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .directory import MANIFEST
from .shared_counter import SharedCounter

__all__ = [
    "Deletion",
    "StoredFile",
    "delete_values",
    "namespaces",
    "on_disk",
    "remove_if_empty",
    "stored_files",
    "values_of",
]

PAGE = 4096

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")


class StoredFile(NamedTuple):
    """One value as a directory listing shows it."""

    used_ns: int
    """When it was used last."""
    num_bytes: int
    """On the disk."""
    path: str

    @property
    def namespace(self) -> str:
        """Digest of the namespace it is in."""
        return self.path.rsplit(os.sep, 3)[1]


class Deletion(NamedTuple):
    """What `delete_values` did, and what it left."""

    deleted_values: int
    deleted_bytes: int
    values: int
    bytes: int


def namespaces(directory: Path) -> list[Path]:
    """The directory of each namespace, in the order of their digests."""
    return sorted(Path(path) for path in _directories(directory, _NAMESPACE))


def stored_files(directory: Path) -> Iterator[StoredFile]:
    """Every value of every namespace in `directory`; O(values)."""
    for namespace in _directories(directory, _NAMESPACE):
        yield from values_of(namespace)


def values_of(namespace: str | Path) -> Iterator[StoredFile]:
    """Every value in the directory of one namespace."""
    for shard in _directories(namespace, _SHARD):
        with contextlib.suppress(FileNotFoundError), os.scandir(shard) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield StoredFile(status.st_mtime_ns, on_disk(status.st_size), entry.path)


def _directories(parent: str | Path, name: re.Pattern[str]) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield entry.path


def on_disk(num_bytes: int) -> int:
    """What a file of `num_bytes` occupies."""
    return -(-num_bytes // PAGE) * PAGE


def delete_values(
    directory: Path, used: SharedCounter, is_unwanted: Callable[[StoredFile, int], bool], *, reserved: int = 0
) -> Deletion:
    """Delete every value that `is_unwanted`, and set `used` to the bytes of the others, and those that are `reserved`.
    Raises `OSError`.

    It is asked about each value, least recently used first, with the bytes that are still stored. `used` is locked
    meanwhile, so servers that store wait. O(n log n) for n values.
    """
    with used.exclusive():
        files = sorted(stored_files(directory))
        num_bytes = left = sum(file.num_bytes for file in files)
        deleted = 0
        for file in files:
            if is_unwanted(file, left):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
                deleted += 1
                left -= file.num_bytes
        used.write(left + reserved)
    return Deletion(deleted, num_bytes - left, len(files) - deleted, left)


def remove_if_empty(namespace: Path) -> bool:
    """Remove the directory of a namespace that holds no value; True if it is gone. Raises `OSError`.

    A server makes it again. The caller has locked the counter of the storage directory, or is the only one who uses
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
