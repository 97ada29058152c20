"""Whatever call to the disk fails, and wherever the process ends: what was stored before stays, no value is half there
or another one, the directory keeps to its size, and goes on.

Each operation is done again and again, with a fault at its first call, its second one, and so on to its last. Calls are
counted by the functions of `os` that the process uses, whatever it uses them for. What a process would do after its end
does not happen either: from there on every call ends it again, those of `finally` and `except` too.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage.file.stores import FILE_BYTES, found_in
from tests.storage.values import DIGEST, file_options, got, keys, namespace, put

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
    """It fails, or the process ends, at the n-th call that reaches it: see the module's text."""

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
        buffered = io.BufferedWriter if mode == "w" else io.BufferedReader
        return raw if "b" in mode else io.TextIOWrapper(buffered(raw))

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


CAPACITY = 10
"""In values."""

STORED = range(1, 5)
"""Before each operation."""


class Place:
    """A directory, with a server that goes on whatever happens to another one, and commands."""

    def __init__(self, directory, capsys):
        self.directory, self.capsys = directory, capsys
        self.opened = []
        self.mine, self.other = None, None

    def open(self, **changes):
        settings = StorageSettings("file", file_options(self.directory, CAPACITY * FILE_BYTES))
        self.opened.append(settings.kind.open(settings, namespace(**changes)))
        return self.opened[-1]

    def fill(self, numbers=STORED):
        self.mine, self.other = self.open(), self.open()
        for number in numbers:
            put(self.other, number)

    def command(self, *words):
        """Exit status and result, which is None for an error in one line."""
        status = cli.main(["storage", *words, "--kvcache-storage-dir", str(self.directory), "--json"])
        told = self.capsys.readouterr()
        if status == 2:
            assert (told.err.count("\n"), told.out) == (1, "")
        return status, json.loads(told.out) if told.out else None

    def path(self, number):
        (path,) = self.directory.rglob(keys(number)[0])
        return path

    def close(self):
        for each in self.opened:
            each.close()


class Operation(NamedTuple):
    """`act` is what meets the fault, in a place that `prepare` has made."""

    name: str
    act: Callable[[Place], object]
    prepare: Callable[[Place], object] = Place.fill
    may_lose: tuple[int, ...] = ()
    """Of the values that `prepare` has stored."""


def with_damage(place):
    place.fill()
    with open(place.path(2), "r+b") as file:
        file.truncate(100)


def with_what_is_no_file(place):
    place.fill()
    path = place.path(2)
    place.mine.remove(keys(2))
    (path / "deeper").mkdir(parents=True)


def full(place):
    place.fill(range(1, CAPACITY + 1))


def half_deleted(place):
    place.fill()
    (place.directory / DIGEST / "manifest.json").unlink()
    shutil.rmtree(place.directory / "tmp")


def that_could_not_write(place):
    place.fill()
    with BrokenDisk(Fault("", ["flock"], errno.EROFS), 1).mounted():
        place.mine = place.open()
    assert not place.mine.can_write


def doubted(place):
    place.fill()
    place.other.remove_damaged([])


def with_a_budget(place):
    place.fill()
    place.mine.write_bytes_per_day = 1 << 30


FULL = tuple(range(1, CAPACITY + 1))
OPERATIONS = [
    Operation("open a new directory", Place.open, lambda place: None),
    Operation("open", Place.open),
    Operation("open for another model", lambda place: place.open(model="n")),
    Operation("open what others have half deleted", Place.open, half_deleted),
    Operation("put", lambda place: put(place.mine, 5, 6, 7)),
    Operation("put what is stored in part", lambda place: put(place.mine, 1, 5, 2)),
    Operation("put into a full directory", lambda place: put(place.mine, 11, 12), full, FULL[:3]),
    Operation("put after others have deleted", lambda place: put(place.mine, 5, 6), half_deleted),
    Operation("put instead of a damaged value", lambda p: (got(p.mine, 2), put(p.mine, 2, 5)), with_damage, (2,)),
    Operation("put instead of a directory", lambda place: put(place.mine, 2, 5), with_what_is_no_file, (2,)),
    Operation("put once the disk can be written to", lambda place: put(place.mine, 5), that_could_not_write),
    Operation("get", lambda place: got(place.mine, *STORED)),
    Operation("count", lambda place: place.mine.count_stored(keys(*STORED, 5))),
    Operation("touch", lambda place: place.mine.touch(keys(*STORED))),
    Operation("remove", lambda place: place.mine.remove(keys(2, 3)), may_lose=(2, 3)),
    Operation("remove damaged", lambda place: place.mine.remove_damaged(keys(2, 3)), may_lose=(2, 3)),
    Operation("put what is doubted", lambda place: put(place.mine, *STORED, 5), doubted),
    Operation("put within a budget", lambda place: put(place.mine, 5, 6), with_a_budget),
    Operation("info", lambda place: place.command("info")),
    Operation("verify", lambda place: place.command("verify"), with_damage, (2,)),
    Operation("verify --repair", lambda place: place.command("verify", "--repair"), with_damage, (2,)),
    Operation("prune", lambda p: p.command("prune", "--to-gib", f"{2 * FILE_BYTES / 2**30}"), may_lose=(1, 2)),
    Operation("clear", lambda place: place.command("clear"), may_lose=tuple(STORED)),
]

NO_SPACE = [name for name in CHANGES if name not in ("unlink", "rmdir")]
FAULTS = [
    Fault("no space", NO_SPACE, errno.ENOSPC),
    Fault("no space from then on", NO_SPACE, errno.ENOSPC, stays=True),
    Fault("an error", CHANGES, errno.EIO),
    Fault("a stale directory", [*READS, "flock"], errno.ESTALE, stays=True),
    Fault("half a write, and an error", ["write", "pwrite"], errno.EIO, half=True),
    Fault("the end", CHANGES),
    Fault("the end in a write", ["write", "pwrite"], half=True),
]


@pytest.fixture
def memory():
    """A directory in memory, where there is one: a thousand of them are made and deleted."""
    is_there = os.access("/dev/shm", os.W_OK)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if is_there else None) as path:
        yield Path(path)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_fault_at_every_step(operation, fault, memory, capsys):
    for number in itertools.count(1):
        place = Place(memory / f"{number}", capsys)
        files = open_files()
        operation.prepare(place)
        disk = BrokenDisk(fault, number)
        with contextlib.suppress(ProcessEndedError), disk.mounted():
            try:
                operation.act(place)
            except StorageError:
                pass
            except ConfigError:
                assert operation.name.startswith("open")
        check(place, operation, fault)
        place.close()
        assert fault.code is None or open_files() == files, "what failed is closed"
        if not disk.has_failed:
            return


def open_files():
    return len(os.listdir("/proc/self/fd"))


def check(place, operation, fault):
    before = FULL if operation.prepare is full else tuple(STORED) if place.mine else ()
    may_lose, most_lost = set(operation.may_lose), 0
    if fault.code == errno.ENOSPC and fault.stays:
        may_lose = set(before)  # the oldest values make room
    if fault.code == errno.EIO:
        most_lost = 1  # a value that cannot be read is forgotten
    opened = place.open()
    for backend in (place.other or opened, opened):
        there = {number for number in range(13) if got(backend, number)}  # each of them is what it was
        assert len({*before} - there - may_lose) <= most_lost
    status, result = place.command("verify")
    damaged = [os.path.basename(path) for path in result["damaged"]]
    assert (status, damaged) in ((0, []), (1, keys(2))), "what the operation found"
    for path in (*place.directory.glob("tmp/*"), *place.directory.glob("format.*")):
        os.utime(path, (1, 1))  # its writer has ended long ago
    place.open()
    ours = {"format", "used", "tmp", DIGEST, namespace(model="n").digest}
    assert {path.name for path in place.directory.iterdir()} <= ours
    assert not any((place.directory / "tmp").iterdir())
    for number in range(100, 102 + CAPACITY):
        assert put(opened, number) == 1
        assert found_in(opened)[1] <= CAPACITY * FILE_BYTES
    assert got(opened, *range(104, 102 + CAPACITY)) == CAPACITY - 2, "no room is lost"
