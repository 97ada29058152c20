"""SharedCounter: a number in a file that several processes add to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SharedCounter"]

_NUMBER = struct.Struct("<q")


class SharedCounter:
    """Thread-safe, and safe between processes of one machine. Every method may raise `OSError`."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        """No other process or thread reads or writes the number meanwhile. Reentrant."""
        with self._lock:
            if self._depth == 0:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
