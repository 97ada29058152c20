"""SharedCounter: a number in a file that several processes add to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SharedCounter"]

_NUMBER = struct.Struct("<q")

LOCK_TIMEOUT_S = 10.0
"""Longer than an eviction lists a directory, which is the longest that anybody holds the lock."""


class SharedCounter:
    """Thread-safe, and safe between processes of one machine. Every method may raise `OSError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        self._lock = threading.RLock()
        self._depth = 0

    def add(self, number: int) -> int:
        """Returns the sum."""
        with self.exclusive():
            total = self.read() + number
            self.write(total)
            return total

    def read(self) -> int:
        content = os.pread(self._file, _NUMBER.size, 0)
        return int(_NUMBER.unpack(content)[0]) if len(content) == _NUMBER.size else 0

    def write(self, number: int) -> None:
        os.pwrite(self._file, _NUMBER.pack(max(0, number)), 0)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other process or thread reads or writes the number meanwhile. Reentrant.

        A file that was deleted is made again, at 0.
        """
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._acquire()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _acquire(self) -> None:
        _lock(self._file)
        while os.fstat(self._file).st_nlink == 0:  # deleted: other processes count in the new file
            new = _open(self._path)
            os.close(self._file)
            self._file = new
            _lock(self._file)

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _lock(file: int) -> None:
    """Raises `TimeoutError` when another process, stopped perhaps, does not let go."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held its lock for {LOCK_TIMEOUT_S:.0f} s")
        time.sleep(0.002)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
