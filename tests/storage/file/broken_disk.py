"""A disk that fails, or a process that ends, at the n-th call that reaches the disk.

Calls are counted by the functions of `os` that the process uses, whatever it uses them for. What a process would do
after its end does not happen either: from there on every call ends it again, those of `finally` and `except` too.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

ENTRIES = ["link", "mkdir", "open", "rename", "replace", "rmdir", "symlink", "unlink"]
CONTENTS = ["chmod", "fdatasync", "fsync", "ftruncate", "pwrite", "pwritev", "truncate", "utime", "write", "writev"]
CHANGES = [*ENTRIES, *CONTENTS]
READS = ["fstat", "listdir", "lstat", "open", "pread", "preadv", "read", "scandir", "stat", "statvfs"]


class ProcessEndedError(BaseException):
    """Nobody may catch it."""


class Fault(NamedTuple):
    """What happens at the n-th of the calls that it may hit."""

    name: str
    calls: list[str]
    code: int | None = None
    """Number of the error that the call raises; None: the process ends."""
    half: bool = False
    """Of what the call writes, one half reaches the disk before."""
    stays: bool = False
    """Later calls fail as well."""


class BrokenDisk:
    """See the module's text."""

    def __init__(self, fault: Fault, number: int) -> None:
        self.fault, self.left = fault, number
        self.has_failed = False

    @contextmanager
    def mounted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for name in {*CHANGES, *READS}:
                patched.setattr(os, name, self._guarded(name, getattr(os, name)))
            patched.setattr(fcntl, "flock", self._guarded_lock(fcntl.flock))
            for module in (builtins, io):
                patched.setattr(module, "open", self._open)
            yield

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*given: Any, **options: Any) -> Any:
            self._meet(name, call, given)
            return call(*given, **options)

        return guarded

    def _guarded_lock(self, lock: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        def guarded(file: Any, how: int) -> None:
            if how & fcntl.LOCK_EX and not how & fcntl.LOCK_UN:
                self._meet("flock", lock, (file, how))
            lock(file, how)

        return guarded

    def _open(self, file: Any, mode: str = "r", *given: Any, opener: Any = None, **options: Any) -> Any:
        """Files that `os.open` opens, and whose bytes `os.write` writes."""
        raw = _File(file, mode.replace("b", ""), opener=opener or (lambda path, flags: os.open(path, flags, 0o666)))
        return (
            raw if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw) if mode == "w" else io.BufferedReader(raw))
        )

    def _meet(self, name: str, call: Callable[..., Any], given: tuple[Any, ...]) -> None:
        fault = self.fault
        if self.has_failed and fault.code is None:
            raise ProcessEndedError(name)
        if name not in fault.calls:
            return
        if not self.has_failed:
            self.left -= 1
            if self.left:
                return
            self.has_failed = True
            if fault.half:
                call(given[0], given[1][: len(given[1]) // 2], *given[2:])
        elif not fault.stays:
            return
        if fault.code is None:
            raise ProcessEndedError(name)
        raise OSError(fault.code, os.strerror(fault.code))


class _File(io.FileIO):
    def write(self, data: Any) -> int:
        return os.write(self.fileno(), bytes(data))
