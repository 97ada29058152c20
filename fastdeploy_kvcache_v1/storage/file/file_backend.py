"""FileBackend: a directory with one file per value. No server; processes of one machine share it.

`directory.py` shows what lies where. The file system is the index, the allocator and the transaction: a value appears
by `rename`, so a process may end at any moment, and a reader keeps a file that is deleted meanwhile. What a crash of
the machine leaves half written is found by its checksum. Modification times are the order of eviction, as in ccache.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ...errors import ConfigError, StorageError
from ..base import StorageBackend, StoreKey
from ..namespace import Namespace
from .directory import FORMAT, MANIFEST, TEMPORARY, make_directories, open_directory, remove_abandoned
from .value_files import delete_values, on_disk

__all__ = ["FileBackend"]

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.9
"""Of the capacity, what an eviction leaves: each one lists the directory, so it makes room for many values."""

FREE_SHARE, MOST_FREE_BYTES = 0.01, 1 << 30
"""Of the file system, what stays free, at most so much: a full disk harms others more than a value is worth."""

TOUCHED_S = 30.0
"""A value that was used is marked as used at most so often."""

SILENCE_S = 60.0
"""Between two lines of the log about values that cannot be used."""

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}

ERRORS_OF_A_VALUE = {errno.EIO, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENXIO, errno.EBADMSG}
"""A bad sector, or what is no file of ours: other values can be read. All other errors are the store's."""

MOST_UNUSABLE = 1024

T = TypeVar("T")


class FileBackend(StorageBackend):
    """See the module's text."""

    name = "file"

    def __init__(self, directory: Path, namespace: Namespace, *, capacity_bytes: int) -> None:
        """Makes `directory` if need be. Raises `ConfigError` when it cannot be used, or another version wrote it."""
        if capacity_bytes <= 0:
            raise ConfigError(f"the storage directory needs a capacity above 0 bytes, got {capacity_bytes}")
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self._namespace = namespace
        self.namespace_digest = namespace.digest
        self._root = directory / self.namespace_digest
        self._prefix = f"{self._root}{os.sep}"
        self._temporary = f"{directory / TEMPORARY}{os.sep}"
        self._needed = [str(path) for path in (directory / FORMAT, directory / TEMPORARY, self._root / MANIFEST)]
        self._numbers = itertools.count()
        self._num_unsaid = 0
        self._silent_until = 0.0
        """Of values that were forgotten."""
        self._has_said_full = False
        """That the disk, and not the capacity, decides what is kept."""
        self._unusable: dict[StoreKey, int] = {}
        """Values that can neither be read nor deleted, and when their files last changed: another may be good."""
        self._used = open_directory(directory, namespace)
        if self.can_write:
            remove_abandoned(directory)

    @property
    def can_write(self) -> bool:
        """False where nothing can be stored, at least now."""
        return self._used is not None

    def count_stored(self, keys: Sequence[StoreKey]) -> int:
        for number, key in enumerate(keys):
            try:
                if not self._is_there(key):
                    return number
            except OSError as error:
                raise StorageError(f"cannot look into {self._root}: {error.strerror}") from error
        return len(keys)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        now = time.time_ns()
        for number, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            try:
                if not self._read(self._path(key), buffer, used_ns=now - number * 1000):
                    self._forget(key, "it has the wrong size")
                    return number
                self._unusable.pop(key, None)
            except FileNotFoundError:
                return number
            except OSError as error:
                if error.errno in ERRORS_OF_A_VALUE:
                    self._forget(key, error.strerror)
                    return number
                raise StorageError(f"cannot read from {self._root}: {error.strerror}") from error
        return len(keys)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        if self._used is None:  # a full disk may have room again
            try:
                self._used = open_directory(self.directory, self._namespace)
            except ConfigError as error:
                raise StorageError(str(error)) from error
        if self._used is None:
            raise StorageError(f"{self.directory} cannot be written to")
        missing = [(key, buffer) for key, buffer in zip(keys, buffers, strict=True) if not self._is_stored(key)]
        if not missing:
            return 0
        self._make_what_was_deleted()
        try:
            self._put(missing)
        except OSError as error:
            raise StorageError(f"cannot write to {self.directory}: {error.strerror}") from error
        return len(missing)

    def _put(self, missing: Sequence[tuple[StoreKey, memoryview]]) -> None:
        """Reserve the bytes of all, and give back those that were not written."""
        assert self._used is not None
        sizes = [on_disk(len(buffer)) for _, buffer in missing]
        written = 0
        total = self._used.add(sum(sizes))
        try:
            self._make_room(sum(sizes), total)
            for (key, buffer), size in zip(missing, sizes, strict=True):
                try:
                    self._write(key, buffer)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    self._write_to_full_disk(key, buffer, sum(sizes) - written, written)
                written += size
            self.touch([key for key, _ in missing])  # the last block of a prefix is the first to go
        finally:
            with contextlib.suppress(OSError):
                self._used.add(written - sum(sizes))

    def touch(self, keys: Sequence[StoreKey]) -> None:
        if self._used is None:
            return
        now = time.time_ns()
        for number, key in enumerate(keys):
            used_ns = now - number * 1000
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(used_ns, used_ns))

    def remove(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            path = self._path(key)
            try:
                status = os.lstat(path)
                if stat.S_ISDIR(status.st_mode):
                    os.rename(path, self._temporary_path())
                else:
                    os.unlink(path)
                if self._used is not None and stat.S_ISREG(status.st_mode):
                    self._used.add(-on_disk(status.st_size))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StorageError(f"cannot delete from {self._root}: {error.strerror}") from error

    def close(self) -> None:
        if self._used is not None:
            self._used.close()

    def _path(self, key: StoreKey) -> str:
        return f"{self._prefix}{key[:2]}{os.sep}{key}"

    def _temporary_path(self) -> str:
        return f"{self._temporary}{os.getpid()}.{id(self):x}.{next(self._numbers)}"

    def _is_stored(self, key: StoreKey) -> bool:
        """And in use now."""
        with contextlib.suppress(OSError):
            if self._is_there(key):
                os.utime(self._path(key))
                return True
        return False

    def _is_there(self, key: StoreKey) -> bool:
        """Raises `OSError` when the directory fails."""
        try:
            status = os.lstat(self._path(key))
            if stat.S_ISREG(status.st_mode):
                return self._unusable.get(key) != status.st_mtime_ns
            self._forget(key, "it is not a file")
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in ERRORS_OF_A_VALUE:
                raise
            self._forget(key, error.strerror)
        return False

    def _read(self, path: str, buffer: memoryview, used_ns: int) -> bool:
        """True if the file has exactly the bytes that fill `buffer`. One `fstat` serves both questions."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size != len(buffer) or not _fill(buffer, file):
                return False
            if self.can_write and used_ns - status.st_mtime_ns > TOUCHED_S * 1e9:
                with contextlib.suppress(OSError):
                    os.utime(file, ns=(used_ns, used_ns))
            return True
        finally:
            os.close(file)

    def _forget(self, key: StoreKey, why: str | None) -> None:
        """What is no block, or cannot be read, would count as stored for ever, and never be repaired."""
        if key not in self._unusable:
            self._say_forgotten(key, why)
        if len(self._unusable) >= MOST_UNUSABLE:
            self._unusable.clear()
        self._unusable[key] = 0
        with contextlib.suppress(OSError):
            self._unusable[key] = os.lstat(self._path(key)).st_mtime_ns
        if self.can_write:
            with contextlib.suppress(StorageError):
                self.remove([key])
                self._unusable.pop(key, None)

    def _say_forgotten(self, key: StoreKey, why: str | None) -> None:
        """One line a minute: a directory that may not be looked into any more makes all of its values unusable."""
        self._num_unsaid += 1
        now = time.monotonic()
        if now >= self._silent_until:
            more = f", and {self._num_unsaid - 1} more values" if self._num_unsaid > 1 else ""
            logger.warning("%s is ignored (%s): its block is a miss%s", self._path(key), why, more)
            self._num_unsaid, self._silent_until = 0, now + SILENCE_S

    def _write(self, key: StoreKey, buffer: memoryview) -> None:
        temporary, path = self._temporary_path(), self._path(key)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = self._in_directories(path, lambda: os.open(temporary, flags, 0o600))
        try:
            try:
                _write(file, buffer)
            finally:
                os.close(file)
            self._in_directories(path, lambda: os.rename(temporary, path))
            self._unusable.pop(key, None)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _in_directories(self, path: str, act: Callable[[], T]) -> T:
        """Result of `act`, which needs the directory of `path` and `tmp/`. They are made when they are missing."""
        assert self._used is not None
        with contextlib.suppress(FileNotFoundError):
            return act()
        with self._used.exclusive():  # nobody removes them meanwhile
            self._make_what_was_deleted()
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            return act()

    def _make_what_was_deleted(self) -> None:
        """Other processes, and people, delete directories that servers use."""
        assert self._used is not None
        if all(map(os.path.exists, self._needed)):
            return
        try:
            make_directories(self.directory, self._namespace, self._used)
        except OSError as error:
            raise StorageError(f"cannot write to {self.directory}: {error.strerror}") from error
        except ConfigError as error:  # another user's directory now
            raise StorageError(str(error)) from error

    # ---- capacity

    def _make_room(self, num_bytes: int, total: int) -> None:
        """For `num_bytes` that make it `total`: if that is too much, the values go that were not used for longest."""
        assert self._used is not None
        limit = min(self.capacity_bytes, total - num_bytes + _free_bytes(self.directory))
        if total <= limit:
            return
        if num_bytes > self.capacity_bytes:
            raise StorageError(
                f"{num_bytes} bytes at once do not fit {self.directory}, whose capacity is {self.capacity_bytes}"
            )
        if num_bytes > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if limit < self.capacity_bytes:
            self._say_disk_is_full(limit)
        with self._used.exclusive():
            if self._used.read() > limit:  # else another process has made room meanwhile
                self._evict(limit, num_bytes)

    def _write_to_full_disk(self, key: StoreKey, buffer: memoryview, num_bytes: int, written: int) -> None:
        """The disk, or a quota on it, had no room for the last `num_bytes` of a put, after `written` bytes of it: there
        is room for what is stored now, and no more. Raises `OSError` if the put itself would have to make room.

        One process after the other tries again, since the ranks of a server fill a disk at the same time, and what the
        first one deletes is room for all.
        """
        assert self._used is not None
        with self._used.exclusive():
            try:
                return self._write(key, buffer)
            except OSError as error:
                limit = self._used.read() - num_bytes
                if error.errno not in NO_ROOM or int(limit * KEPT_SHARE) < num_bytes + written:
                    raise
            self._say_disk_is_full(limit)
            self._evict(limit, num_bytes)
            self._write(key, buffer)

    def _evict(self, limit: int, num_bytes: int) -> None:
        """Reserve `num_bytes`, which are counted already, within `limit`."""
        assert self._used is not None
        kept = max(0, int(limit * KEPT_SHARE) - num_bytes)
        delete_values(self.directory, self._used, lambda _, stored: stored > kept, reserved=num_bytes)

    def _say_disk_is_full(self, limit: int) -> None:
        if not self._has_said_full:
            self._has_said_full = True
            logger.warning(
                "the disk of %s is full: evicting the oldest values, capacity %d MiB instead of %d",
                self.directory,
                limit >> 20,
                self.capacity_bytes >> 20,
            )


def _free_bytes(directory: Path) -> int:
    """Of its file system, beyond what stays free."""
    status = os.statvfs(directory)
    reserve = min(MOST_FREE_BYTES, int(status.f_blocks * status.f_frsize * FREE_SHARE))
    return status.f_bavail * status.f_frsize - reserve


def _fill(buffer: memoryview, file: int) -> bool:
    """False if the file ends before that."""
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
