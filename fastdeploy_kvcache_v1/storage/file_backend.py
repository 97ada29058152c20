"""FileBackend: a directory with one file per value. No server; processes of one machine share it.

    DIR/format                         which version wrote this directory
    DIR/used                           bytes of all files, see `SharedCounter`
    DIR/tmp/                           files that are being written
    DIR/NAMESPACE/manifest.json        what the namespace stands for
    DIR/NAMESPACE/ab/KEY               one value; ab are the first two characters of its key

The file system is the index, the allocator and the transaction: a value appears by `rename`, so a process may end at
any moment, and a reader keeps a file that is deleted meanwhile. What a crash of the machine leaves half written is
found by its checksum. Modification times are the order of eviction, as in ccache.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, StorageError
from .base import StorageBackend, StorageUsage, StoreKey
from .namespace import FORMAT_VERSION, Namespace
from .shared_counter import SharedCounter

__all__ = ["FileBackend", "StoredFile", "stored_files"]

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.9
"""Of the capacity, what an eviction leaves: each one lists the directory, so it makes room for many values."""

PAGE = 4096
ABANDONED_S = 600.0
"""A file in `tmp/` that nobody wrote to for so long was left behind by a process that ended."""

TOUCHED_S = 30.0
"""A value that was used is marked as used at most so often."""

_VALUE = "[0-9a-f][0-9a-f]"
_FORMAT = f"fastdeploy-kvcache-v1 storage {FORMAT_VERSION}\n"


class StoredFile(NamedTuple):
    """One value as a directory listing shows it."""

    used_ns: int
    """When it was used last."""
    num_bytes: int
    """On the disk."""
    path: str


class FileBackend(StorageBackend):
    """See the module's text."""

    name = "file"

    def __init__(self, directory: Path, namespace: Namespace, *, capacity_bytes: int) -> None:
        """Makes `directory` if need be. Raises `ConfigError` when it cannot be used, or another version wrote it."""
        if capacity_bytes <= 0:
            raise ConfigError(f"the storage directory needs a capacity above 0 bytes, got {capacity_bytes}")
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self._root = directory / namespace.digest
        self._prefix = f"{self._root}{os.sep}"
        self._numbers = itertools.count()
        self.can_write = _open_directory(directory, self._root, namespace)
        self._used = SharedCounter(directory / "used") if self.can_write else None
        if self.can_write:
            _remove_abandoned(directory / "tmp")

    def count_stored(self, keys: Sequence[StoreKey]) -> int:
        for number, key in enumerate(keys):
            try:
                os.stat(self._path(key))
            except FileNotFoundError:
                return number
            except OSError as error:
                raise StorageError(f"cannot look into {self._root}: {error.strerror}") from error
        return len(keys)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        now = time.time_ns()
        for number, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            try:
                with _opened(self._path(key), os.O_RDONLY) as file:
                    if not _read(file, buffer):
                        return number
                    self._touch(file, now - number * 1000)  # the last block of a prefix is the first to go
            except FileNotFoundError:
                return number
            except OSError as error:
                raise StorageError(f"cannot read from {self._root}: {error.strerror}") from error
        return len(keys)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        if self._used is None:
            raise StorageError(f"{self.directory} cannot be written to")
        missing = [(key, buffer) for key, buffer in zip(keys, buffers, strict=True) if not self._is_stored(key)]
        if not missing:
            return 0
        sizes = [_on_disk(len(buffer)) for _, buffer in missing]
        written = 0
        try:
            self._make_room(sum(sizes))
            for (key, buffer), size in zip(missing, sizes, strict=True):
                self._write(key, buffer)
                written += size
        except OSError as error:
            raise StorageError(f"cannot write to {self.directory}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                self._used.add(written - sum(sizes))
        return len(missing)

    def remove(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StorageError(f"cannot delete from {self._root}: {error.strerror}") from error

    def usage(self) -> StorageUsage:
        files = list(stored_files(self.directory))
        return StorageUsage(len(files), sum(file.num_bytes for file in files), self.capacity_bytes)

    def close(self) -> None:
        if self._used is not None:
            self._used.close()

    def _path(self, key: StoreKey) -> str:
        return f"{self._prefix}{key[:2]}{os.sep}{key}"

    def _is_stored(self, key: StoreKey) -> bool:
        try:
            os.utime(self._path(key))
        except OSError:
            return False
        return True

    def _touch(self, file: int, used_ns: int) -> None:
        if self.can_write and used_ns - os.fstat(file).st_mtime_ns > TOUCHED_S * 1e9:
            with contextlib.suppress(OSError):
                os.utime(file, ns=(used_ns, used_ns))

    def _write(self, key: StoreKey, buffer: memoryview) -> None:
        temporary = self.directory / "tmp" / f"{os.getpid()}.{id(self):x}.{next(self._numbers)}"
        path = self._path(key)
        try:
            with _opened(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                _write(file, buffer)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    # ---- capacity

    def _make_room(self, num_bytes: int) -> None:
        """Reserve `num_bytes`, deleting the values that were not used for longest if they are more than there is."""
        assert self._used is not None
        if self._used.add(num_bytes) <= self.capacity_bytes:
            return
        if num_bytes > self.capacity_bytes:
            raise StorageError(
                f"{num_bytes} bytes at once do not fit {self.directory}, whose capacity is {self.capacity_bytes}"
            )
        with self._used.exclusive():
            if self._used.read() <= self.capacity_bytes:
                return  # another process has made room meanwhile
            files = sorted(stored_files(self.directory))
            used = sum(file.num_bytes for file in files)
            kept = max(0, int(self.capacity_bytes * KEPT_SHARE) - num_bytes)
            for file in files:
                if used <= kept:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
                used -= file.num_bytes
            self._used.write(used + num_bytes)


def stored_files(directory: Path) -> Iterator[StoredFile]:
    """Every value of every namespace in `directory`; O(values)."""
    for shard in directory.glob(f"*/{_VALUE}"):
        with contextlib.suppress(FileNotFoundError), os.scandir(shard) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    yield StoredFile(status.st_mtime_ns, _on_disk(status.st_size), entry.path)


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _open_directory(directory: Path, root: Path, namespace: Namespace) -> bool:
    """Check, or make, what is in `directory`. Returns whether it can be written to."""
    try:
        found = (directory / "format").read_text()
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise ConfigError(f"the storage directory {directory} cannot be read: {error.strerror}") from None
    if found not in (None, _FORMAT):
        raise ConfigError(
            f"the storage directory {directory} was written by another version ({found.strip()!r:.80}, this one writes "
            f"{_FORMAT.strip()!r}): name another directory, or delete this one"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if found is None and any(directory.iterdir()):
            raise ConfigError(f"{directory} holds other files: name an empty directory, or a new one, for the storage")
        (directory / "tmp").mkdir(mode=0o700, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        _write_text(directory, directory / "format", _FORMAT)
        _write_text(directory, root / "manifest.json", namespace.manifest())
    except OSError as error:
        if found is None:
            raise ConfigError(f"the storage directory {directory} cannot be made: {error.strerror}") from None
        logger.warning("%s cannot be written to (%s): nothing will be stored", directory, error.strerror)
        return False
    return True


def _write_text(directory: Path, path: Path, text: str) -> None:
    """As a whole or not at all, whatever others do."""
    temporary = directory / "tmp" / f"{os.getpid()}.{path.name}"
    temporary.write_text(text)
    temporary.rename(path)


def _remove_abandoned(directory: Path) -> None:
    limit = time.time() - ABANDONED_S
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < limit:
                    os.unlink(entry.path)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _read(file: int, buffer: memoryview) -> bool:
    """True if the file has exactly the bytes that fill `buffer`."""
    if os.fstat(file).st_size != len(buffer):
        return False
    offset = 0
    while offset < len(buffer):
        count = os.preadv(file, [buffer[offset:]], offset)
        if count == 0:
            return False
        offset += count
    return True


def _write(file: int, buffer: memoryview) -> None:
    offset = 0
    while offset < len(buffer):
        offset += os.write(file, buffer[offset:])
