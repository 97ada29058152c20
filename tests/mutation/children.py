"""Functions that run in forked children, a few at a time, within bounds of time and memory."""

from __future__ import annotations

import os
import pickle
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 3 << 30
"""What a child may take more than its parent has."""


class Ended(NamedTuple):
    task: Any
    result: Any
    """What the child returned or told last; None where it did not live to tell anything."""
    finished: bool


class _Child(NamedTuple):
    task: Any
    pid: int
    fd: int
    directory: Path
    deadline: float


def run_all(
    tasks: Iterator[tuple[Any, float]],
    function: Callable[[Any, Callable[[Any], None]], Any],
    jobs: int,
    *,
    quiet: bool = True,
) -> Iterator[Ended]:
    """Runs `function(task, tell)` in a child for each task, with its limit of seconds; yields them as they end."""
    children: list[_Child] = []
    for task, seconds in tasks:
        children.append(_start(task, seconds, function, quiet))
        if len(children) >= jobs:
            yield _first_of(children)
    while children:
        yield _first_of(children)


def _start(task: Any, seconds: float, function: Callable[[Any, Callable[[Any], None]], Any], quiet: bool) -> _Child:
    directory = Path(tempfile.mkdtemp(prefix="m-"))  # a child has children: paths of sockets have 107 characters
    pid = os.fork()
    if pid == 0:
        _live(task, directory, function, quiet)
    return _Child(task, pid, os.pidfd_open(pid), directory, time.monotonic() + seconds)


def _live(task: Any, directory: Path, function: Callable[[Any, Callable[[Any], None]], Any], quiet: bool) -> None:
    """Everything that a child does; it leaves its files in a directory that its parent removes."""
    done = 1

    def tell(result: Any) -> None:
        (directory / "new").write_bytes(pickle.dumps(result))
        (directory / "new").rename(directory / "result")

    try:
        if quiet:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = str(directory)
        data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = int(data.split()[1]) * 1024 + MEMORY
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        tell(function(task, tell))
        done = 0
    except SystemExit as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        (directory / "error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(done)


def _first_of(children: list[_Child]) -> Ended:
    """Waits until one has ended or its time has."""
    wait = select.poll()
    for child in children:
        wait.register(child.fd, select.POLLIN)
    first = min(children, key=lambda child: child.deadline)
    ready = [fd for fd, _ in wait.poll(_milliseconds(first.deadline))]
    child = next((child for child in children if child.fd in ready), first)
    children.remove(child)
    signal.pidfd_send_signal(child.fd, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.fd)
    told = child.directory / "result"
    result = pickle.loads(told.read_bytes()) if told.exists() else None
    error = child.directory / "error"
    if error.exists():
        print(error.read_text(encoding="utf-8"), file=sys.stderr)
    shutil.rmtree(child.directory, ignore_errors=True)
    return Ended(child.task, result, status == 0)


def _milliseconds(deadline: float) -> float | None:
    return None if deadline == float("inf") else max(0, deadline - time.monotonic()) * 1000
