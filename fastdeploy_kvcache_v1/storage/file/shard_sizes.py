"""ShardSizes: the bytes of each shard of a storage directory, in one small file that processes share."""

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

__all__ = ["SHARDS", "ShardSizes"]

SHARDS = [f"{number:02x}" for number in range(256)]
"""Their names: the first two characters of a key, which begins with a digest."""

LOCK_TIMEOUT_S = 10.0
"""The lock is held for some milliseconds, unless its process was stopped meanwhile."""

POLL_S = 0.001

MOST_BYTES = 1 << 56
"""A shard never has so many: such a number is damage."""

DAY_NS = 24 * 60 * 60 * 10**9

_HEADER = struct.Struct("<qqqq")
"""The counter of older versions, which may still use it; the time of `doubt`; what `spend` left, and when."""
_SHARD = struct.Struct("<qq")
"""Bytes, or what is out of range; how often the shard has changed, 0 in a file that was lost or cut."""
_TABLE = struct.Struct(f"<{2 * len(SHARDS)}q")
_UNKNOWN = -1


class ShardSizes:
    """Thread-safe, and safe between processes of one machine. Every method may raise `OSError`.

    The numbers are derived from the files: a number that is lost is not known, never 0.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._file = _open(path)
        self._lock = threading.RLock()
        self._depth = 0

    def read(self) -> int:
        """Bytes of all shards. A shard that is not known counts as the mean of the others."""
        known = self.known()
        return sum(known.values()) * len(SHARDS) // max(1, len(known))

    def known(self) -> dict[str, int]:
        """Bytes of the shards that were counted since the file was made, lost or damaged."""
        numbers = _TABLE.unpack(os.pread(self._file, _TABLE.size, _HEADER.size).ljust(_TABLE.size, b"\0"))
        shards = zip(SHARDS, numbers[::2], numbers[1::2], strict=True)
        return {shard: size for shard, size, changes in shards if _is_known(size, changes)}

    def unknown(self) -> list[str]:
        """The other shards."""
        with self.exclusive():  # which makes a lost file again
            known = self.known()
            return [shard for shard in SHARDS if shard not in known]

    def filled(self) -> list[str]:
        """Shards with values, as far as it is known."""
        known = self.known()
        return [shard for shard in SHARDS if known.get(shard, 1)]

    def changes(self, shard: str) -> int:
        """Another number after every change of the shard's values: for `count`."""
        with self.exclusive():  # a value may be counted that has not appeared yet
            return self._shard(shard)[1]

    def count(self, shard: str, num_bytes: int, changes: int) -> None:
        """A listing found `num_bytes` in the shard, and `changes` is from before it. Does nothing if the shard has
        changed meanwhile.
        """
        if self._shard(shard) == (num_bytes, changes) and changes:
            return
        with self.exclusive():
            if self._shard(shard)[1] == changes:
                self._write(shard, num_bytes, changes)

    def add(self, shard: str, num_bytes: int) -> None:
        """The caller changes the values of the shard by so much, and holds the lock while it does."""
        with self.exclusive():
            size, changes = self._shard(shard)
            self._write(shard, max(0, size + num_bytes) if _is_known(size, changes) else _UNKNOWN, changes)

    @property
    def doubted_ns(self) -> int:
        """Values that were last used before this time may be damaged."""
        return self._header()[1]

    def doubt(self) -> None:
        with self.exclusive():
            old_counter, _, left, since_ns = self._header()
            os.pwrite(self._file, _HEADER.pack(old_counter, time.time_ns(), left, since_ns), 0)

    def spend(self, num_bytes: int, per_day: int) -> bool:
        """Take `num_bytes` from a budget that grows by `per_day`. False if nothing is left of it.

        It grows for an hour while nothing is spent, and the last bytes may exceed it.
        """
        now_ns = time.time_ns()
        with self.exclusive():
            old_counter, doubted_ns, left, since_ns = self._header()
            grown = max(left, -per_day) + per_day * max(0, now_ns - since_ns) // DAY_NS
            left = min(grown, per_day // 24)
            may = left > 0
            os.pwrite(self._file, _HEADER.pack(old_counter, doubted_ns, left - may * num_bytes, now_ns), 0)
        return may

    def _header(self) -> tuple[int, int, int, int]:
        first, second, third, fourth = _HEADER.unpack(os.pread(self._file, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
        return first, second, third, fourth

    def _shard(self, shard: str) -> tuple[int, int]:
        content = os.pread(self._file, _SHARD.size, _offset(shard))
        size, changes = _SHARD.unpack(content.ljust(_SHARD.size, b"\0"))
        return size, changes

    def _write(self, shard: str, size: int, changes: int) -> None:
        os.pwrite(self._file, _SHARD.pack(size, changes % MOST_BYTES + 1), _offset(shard))

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other process or thread changes a number or a value meanwhile. Reentrant.

        A file that was deleted, or moved away with its directory, is made again.
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
        while not self._is_in_place():
            new = _open(self._path)
            os.dup2(new, self._file, inheritable=False)  # other threads read by this number
            os.close(new)
            _lock(self._file)

    def _is_in_place(self) -> bool:
        """False if other processes count in another file."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _offset(shard: str) -> int:
    return _HEADER.size + _SHARD.size * int(shard, 16)


def _is_known(size: int, changes: int) -> bool:
    return changes != 0 and 0 <= size <= MOST_BYTES


def _lock(file: int) -> None:
    """Raises `TimeoutError` when another process, stopped perhaps, does not let go."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held its lock for {LOCK_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def _open(path: str | Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
