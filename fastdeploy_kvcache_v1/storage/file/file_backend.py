"""FileBackend: a directory with one file per value. No server; processes of one machine share it.

`directory.py` shows what lies where. The file system is the index, the allocator and the transaction: a value appears
by `rename`, so a process may end at any moment, and a reader keeps a file that is deleted meanwhile. What a crash of
the machine leaves half written is found by its checksum. Modification times are the order of eviction, as in ccache.

A value is counted in its shard (`ShardSizes`) and appears under one short lock, so the directory never exceeds its
capacity. Nothing else is locked: neither what is being written, nor a listing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...errors import ConfigError, StorageError
from ..base import StorageBackend, StorageFullError, StoreKey
from ..namespace import Namespace
from .directory import (
    FORMAT,
    MANIFEST,
    TEMPORARY,
    Identity,
    make_directories,
    open_directory,
    recognize,
    remove_abandoned,
    temporary_name,
)
from .eviction import NO_ROOM, Eviction
from .value_files import on_disk
from .verification import is_whole

__all__ = ["FileBackend"]

logger = logging.getLogger(__name__)

TOUCHED_S = 30.0
"""A value that was used is marked as used at most so often."""

SILENCE_S = 60.0
"""Between two lines of the log about values that cannot be used."""

MOST_ATTEMPTS = 100
"""Of a value, while other processes take the room that was made for it."""

ERRORS_OF_A_VALUE = {errno.EIO, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENXIO, errno.EBADMSG}
"""A bad sector, or what is no file of ours: other values can be read. All other errors are the store's."""

NO_DIRECTORY = (FileNotFoundError, NotADirectoryError)
"""No value is there: its shard was deleted, or is something else now."""

MOST_UNUSABLE = 1024

READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
"""Builds of Python for an old C library lack it. They read nothing ahead."""

READ_AHEAD_BYTES = 512 << 10
"""In one call: the kernel cuts larger ones."""


class FileBackend(StorageBackend):
    """See the module's text."""

    name = "file"

    def __init__(
        self, directory: Path, namespace: Namespace, *, capacity_bytes: int, write_bytes_per_day: int | None = None
    ) -> None:
        """Makes `directory` if need be. Raises `ConfigError` when it cannot be used, or another version wrote it."""
        if capacity_bytes <= 0:
            raise ConfigError(f"the storage directory needs a capacity above 0 bytes, got {capacity_bytes}")
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.write_bytes_per_day = write_bytes_per_day
        self._namespace = namespace
        self.namespace_digest = namespace.digest
        self._root = directory / self.namespace_digest
        self._prefix = f"{self._root}{os.sep}"
        self._temporary = f"{directory / TEMPORARY}{os.sep}"
        self._needed = [str(path) for path in (directory / FORMAT, directory / TEMPORARY, self._root / MANIFEST)]
        self._num_unsaid = 0
        self._silent_until = 0.0
        """Of values that were forgotten."""
        self._unusable: dict[StoreKey, int] = {}
        """Values that can neither be read nor deleted, and when their files last changed: another may be good."""
        self._eviction = Eviction(directory, capacity_bytes)
        self._used = open_directory(directory, namespace)
        try:
            self._identity = Identity.of(directory)
        except OSError as error:
            self.close()
            raise StorageError(f"cannot look into {directory}: {error.strerror}") from error
        if self.can_write:
            remove_abandoned(directory)

    @property
    def can_write(self) -> bool:
        """False where nothing can be stored, at least now."""
        return self._used is not None

    def count_stored(self, keys: Sequence[StoreKey]) -> int:
        self._recognize()
        for number, key in enumerate(keys):
            try:
                if self._status(key) is None:
                    return number
            except OSError as error:
                raise StorageError(f"cannot look into {self._root}: {error.strerror}") from error
        return len(keys)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        self._recognize()
        now = time.time_ns()
        later = deque(map(self._path, keys))
        for number, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if later:
                later.popleft()
            try:
                if not self._read(self._path(key), buffer, now - number * 1000, later):
                    self._forget(key, "it has the wrong size")
                    return number
                self._unusable.pop(key, None)
            except NO_DIRECTORY:
                return number
            except OSError as error:
                if error.errno in ERRORS_OF_A_VALUE:
                    self._forget(key, error.strerror)
                    return number
                raise StorageError(f"cannot read from {self._root}: {error.strerror}") from error
        return len(keys)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        self._recognize()
        if self._used is None:  # a full disk may have room again
            try:
                self._used = open_directory(self.directory, self._namespace)
            except ConfigError as error:
                raise StorageError(str(error)) from error
        if self._used is None:
            raise StorageError(f"{self.directory} cannot be written to")
        try:
            doubted_ns = self._used.doubted_ns
            pairs = zip(keys, buffers, strict=True)
            missing = [(key, buffer) for key, buffer in pairs if not self._is_stored(key, len(buffer), doubted_ns)]
            if missing:
                self._make_what_was_deleted()
                self._put(missing)
        except OSError as error:
            raise StorageError(f"cannot write to {self.directory}: {error.strerror}") from error
        return len(missing)

    def _put(self, missing: Sequence[tuple[StoreKey, memoryview]]) -> None:
        assert self._used is not None
        sizes = [on_disk(len(buffer)) for _, buffer in missing]
        if self.write_bytes_per_day and not self._used.spend(sum(sizes), self.write_bytes_per_day):
            raise StorageFullError(0, len(missing))
        self._eviction.make_room(self._used, sum(sizes))
        now = time.time_ns()
        for number, (key, buffer) in enumerate(missing):
            write = partial(self._write, key, buffer, now - number * 1000)  # a prefix's last block is the first to go
            try:
                write()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self._eviction.write_to_full_disk(self._used, write, left=sum(sizes[number:]), whole=sum(sizes))

    def touch(self, keys: Sequence[StoreKey]) -> None:
        if self._used is None:
            return
        self._recognize()
        now = time.time_ns()
        for number, key in enumerate(keys):
            used_ns = now - number * 1000
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(used_ns, used_ns))

    def remove(self, keys: Sequence[StoreKey]) -> None:
        self._recognize()
        for key in keys:
            try:
                self._remove(key)
            except NO_DIRECTORY:
                continue
            except OSError as error:
                raise StorageError(f"cannot delete from {self._root}: {error.strerror}") from error

    def _remove(self, key: StoreKey) -> None:
        path = self._path(key)
        with contextlib.nullcontext() if self._used is None else self._used.exclusive():
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                os.rename(path, self._temporary_path())
            else:
                os.unlink(path)
            if self._used is not None and stat.S_ISREG(status.st_mode):
                self._used.add(key[:2], -on_disk(status.st_size))

    def remove_damaged(self, keys: Sequence[StoreKey]) -> None:
        """Also doubts every value that was used before this: `put` verifies it before it counts as stored. A crash of
        the machine damages many values at once.
        """
        self.remove(keys)
        if self._used is not None:
            try:
                self._used.doubt()
            except OSError as error:
                raise StorageError(f"cannot write to {self.directory}: {error.strerror}") from error

    def close(self) -> None:
        if self._used is not None:
            self._used.close()

    def _path(self, key: StoreKey) -> str:
        return f"{self._prefix}{key[:2]}{os.sep}{key}"

    def _temporary_path(self) -> str:
        return f"{self._temporary}{temporary_name()}"

    def _recognize(self) -> None:
        """Raises `StorageError` if the directory is no longer what was opened, and a start would refuse it."""
        try:
            if Identity.of(self.directory) != self._identity:
                recognize(self.directory, self._identity)
                self._identity = Identity.of(self.directory)
        except FileNotFoundError:
            pass  # its values are misses, and `put` makes it again
        except ConfigError as error:
            raise StorageError(str(error)) from error
        except OSError as error:
            raise StorageError(f"cannot look into {self.directory}: {error.strerror}") from error

    def _is_stored(self, key: StoreKey, num_bytes: int, doubted_ns: int) -> bool:
        """And in use now."""
        with contextlib.suppress(OSError):
            status, path = self._status(key), self._path(key)
            if status is None or status.st_size != num_bytes:
                return False
            if status.st_mtime_ns < doubted_ns and not is_whole(path, self.namespace_digest):
                return False
            os.utime(path)
            return True
        return False

    def _status(self, key: StoreKey) -> os.stat_result | None:
        """None if no value is there. Raises `OSError` when the directory fails."""
        try:
            status = os.lstat(self._path(key))
            if stat.S_ISREG(status.st_mode):
                return status if self._unusable.get(key) != status.st_mtime_ns else None
            self._forget(key, "it is not a file")
        except NO_DIRECTORY:
            pass
        except OSError as error:
            if error.errno not in ERRORS_OF_A_VALUE:
                raise
            self._forget(key, error.strerror)
        return None

    def _read(self, path: str, buffer: memoryview, used_ns: int, later: deque[str]) -> bool:
        """True if the file has exactly the bytes that fill `buffer`. One `fstat` serves both questions.

        Before it waits for the disk, it starts the reads of the files `later`, which it then clears.
        """
        file = os.open(path, READING)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size != len(buffer):
                return False
            if not (later and _fill_from_memory(buffer, file)):
                for each in later:
                    _read_ahead(each)
                later.clear()
                if not _fill(buffer, file):
                    return False
            if self.can_write and abs(used_ns - status.st_mtime_ns) > TOUCHED_S * 1e9:
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

    def _write(self, key: StoreKey, buffer: memoryview, used_ns: int) -> None:
        assert self._used is not None
        temporary = self._temporary_path()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            self._make_what_was_deleted()
            file = os.open(temporary, flags, 0o600)
        try:
            try:
                _write(file, buffer)
                with contextlib.suppress(OSError):
                    os.utime(file, ns=(used_ns, used_ns))
            finally:
                os.close(file)
            attempts = itertools.count(1)
            while not self._commit(key, temporary, on_disk(len(buffer))):  # others have stored meanwhile
                if next(attempts) > MOST_ATTEMPTS:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._eviction.make_room(self._used, on_disk(len(buffer)))
            self._unusable.pop(key, None)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _commit(self, key: StoreKey, temporary: str, num_bytes: int) -> bool:
        """Count the value, then let it appear: a process that ends between has counted too much. False: it would exceed
        the capacity.
        """
        assert self._used is not None
        path, shard = self._path(key), key[:2]
        with self._used.exclusive():
            replaced = 0
            with contextlib.suppress(*NO_DIRECTORY):
                replaced = on_disk(os.lstat(path).st_size)
            if self._used.read() + num_bytes - replaced > self.capacity_bytes:
                return False
            self._used.add(shard, num_bytes - replaced)
            try:
                try:
                    os.rename(temporary, path)
                except NO_DIRECTORY:
                    self._make_what_was_deleted()
                    _make_shard(os.path.dirname(path))
                    os.rename(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    self._used.add(shard, replaced - num_bytes)
                raise
        return True

    def _make_what_was_deleted(self) -> None:
        """Other processes, and people, delete directories that servers use."""
        assert self._used is not None
        if all(map(os.path.exists, self._needed)):
            return
        try:
            recognize(self.directory, self._identity)
            make_directories(self.directory, self._namespace, self._used)
            self._identity = Identity.of(self.directory)
        except ConfigError as error:  # another user's directory now
            raise StorageError(str(error)) from error


def _make_shard(path: str) -> None:
    """Make the directory of a shard, in place of anything else. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
    os.makedirs(path, mode=0o700, exist_ok=True)


def _read_ahead(path: str) -> None:
    with contextlib.suppress(OSError):
        file = os.open(path, READING)
        try:
            for offset in range(0, os.fstat(file).st_size, READ_AHEAD_BYTES):
                os.posix_fadvise(file, offset, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)


def _fill_from_memory(buffer: memoryview, file: int) -> bool:
    """False if the page cache lacks bytes of the file, or the file system cannot tell."""
    with contextlib.suppress(OSError):
        return os.preadv(file, [buffer], 0, NO_WAIT) == len(buffer)
    return False


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
