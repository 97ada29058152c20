"""A sign of life between processes of one machine that needs no message: locks of a file, which the kernel ends.

The owner of shared memory holds one byte of the file as long as it lives, and those who have mapped the memory hold
another one. However a process ends, its locks end with it, and a pid is not needed, so containers may differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
import time
from pathlib import Path

__all__ = ["Presence", "Visit"]

PREFIX = "fastdeploy-kvcache-owner-"
"""Of nothing else: files with it are removed."""

_OWNER, _VISITORS = 0, 1
"""Bytes of the file, and who locks them."""

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, pid."""

_LOOK_S = 0.005


class Presence:
    """The owner's end. `path` is what peers need, another one each time; only processes of the same user open it."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: shared memory, else that of temporary files. Files of owners that were killed are removed from
        it. Raises `OSError` where files cannot be locked.
        """
        self._directory = directory or _directory()
        self._remove_those_of_the_dead()
        while True:
            self.path = str(self._directory / f"{PREFIX}{os.urandom(16).hex()}")
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Until it is locked it looks like one of the dead.
            if _try_lock(self._file, fcntl.F_WRLCK, _OWNER) and os.fstat(self._file).st_nlink:
                return
            os.close(self._file)

    def close(self, timeout_s: float) -> bool:
        """Let nobody in any more, and wait until every visitor has left: False when one has not in time. Once."""
        deadline = time.monotonic() + timeout_s
        while not (are_gone := _try_lock(self._file, fcntl.F_WRLCK, _VISITORS)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._file)
        return are_gone

    def _remove_those_of_the_dead(self) -> None:
        for path in self._directory.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's, or gone meanwhile
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if _try_lock(file, fcntl.F_WRLCK, _OWNER):
                        path.unlink()
                finally:
                    os.close(file)


class Visit:
    """A peer's end: the owner waits for it in `Presence.close`. Any thread."""

    def __init__(self, path: str) -> None:
        """Raises `FileNotFoundError` for an owner that is gone or is going, `PermissionError` for another user's."""
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not _try_lock(self._file, fcntl.F_RDLCK, _VISITORS) or not self.owner_is_alive():
            os.close(self._file)
            raise FileNotFoundError(f"{path} is being given up")

    def owner_is_alive(self) -> bool:
        """Not after its process has ended."""
        asked = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, _OWNER))
        return int(_FLOCK.unpack(asked)[0]) != fcntl.F_UNLCK

    def close(self) -> None:
        """Once."""
        os.close(self._file)


def _directory() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _lock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def _try_lock(file: int, kind: int, byte: int) -> bool:
    """The lock belongs to what was opened, not to the process: it ends with the last descriptor of it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(kind, byte))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return False
    return True
