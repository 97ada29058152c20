"""Leaves nothing behind. `python -m ...cpu_worker.janitor` runs beside the server and waits for its standard input to
end, which happens when the supervisor closes it or dies, however it dies. Then it ends every process of the server and
removes its files.

Processes are known by the variable `FASTDEPLOY_KVCACHE_CPU_RUN` of their environment, which children inherit, and by
their session: gunicorn overwrites the environment that others see of the API server and what it forks, which all stay
in its session. Files in /dev/shm are known by the server's ports in their names; those with random names only by
Python's resource trackers, which run beside the processes that made them and outlive these for a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from .environment import RUN_DIRECTORY

SHARED_MEMORY = Path("/dev/shm")
KILL_TIMEOUT_S = 10.0
TRACKER = "multiprocessing.resource_tracker"
TRACKER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Estate:
    """What one server owns. Crosses to the janitor as JSON."""

    run_directory: str
    port: int
    queue_ports: tuple[int, ...]

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Estate:
        values = json.loads(text)
        return cls(values["run_directory"], values["port"], tuple(values["queue_ports"]))

    def owns(self, name: str) -> bool:
        """Is this file in /dev/shm ours? FastDeploy puts one of its ports into every name."""
        ports = "|".join(map(str, self.queue_ports))
        return bool(
            re.fullmatch(
                rf"{self.port}\.socket|router_{self.port}\.ipc|response_{self.port}_w\d+\.pull"
                rf"|\w+\.({ports})|fmq_ctrl_\w+_rank\d+_({ports})\.ipc|fd_task_queue_({ports})\.sock",
                name,
            )
        )


SESSION_FILE = "session"
"""In the run directory: the session of the API server."""


def record_session(run_directory: Path) -> None:
    """The API server's first act."""
    (run_directory / SESSION_FILE).write_text(str(os.getsid(0)))


def processes_of(run_directory: str) -> list[psutil.Process]:
    """Every process of the server with this run directory, but us."""
    try:
        session = int(Path(run_directory, SESSION_FILE).read_text())
    except (OSError, ValueError):  # it has not come that far
        session = -1
    found = []
    for process in psutil.process_iter():
        try:
            mine = os.getsid(process.pid) == session or process.environ().get(RUN_DIRECTORY) == run_directory
        except (psutil.Error, OSError):  # gone, or another user's
            continue
        if mine and process.pid != os.getpid():
            found.append(process)
    return found


def end_processes(run_directory: str) -> int:
    """Kill them, and those they start meanwhile. Returns how many there were.

    Resource trackers of `multiprocessing` come last: with nobody left to work for they end by themselves, and before
    that remove the shared memory and semaphores that were never given back, whatever their names.
    """
    count = _kill(run_directory, trackers=False)
    deadline = time.monotonic() + TRACKER_TIMEOUT_S
    while any(map(_is_tracker, processes_of(run_directory))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return count + _kill(run_directory, trackers=True)


def _kill(run_directory: str, *, trackers: bool) -> int:
    count, deadline = 0, time.monotonic() + KILL_TIMEOUT_S
    spared: set[psutil.Process] = set()  # a tracker that is about to end cannot be told from others any more
    while time.monotonic() < deadline:
        living = {process for process in processes_of(run_directory) if _is_living(process)}
        spared.update(() if trackers else filter(_is_tracker, living))
        processes = living - spared
        if not processes:
            break
        count += len(processes)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)
    return count


def _is_living(process: psutil.Process) -> bool:
    """Not gone, and not a zombie, which only its parent can end."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return TRACKER in " ".join(process.cmdline())
    except psutil.Error:  # gone, or a zombie
        return False


def remove_files(estate: Estate, shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """Returns the names removed from shared memory."""
    names: Iterable[str] = (path.name for path in shared_memory.iterdir()) if shared_memory.is_dir() else ()
    removed = sorted(name for name in names if estate.owns(name))
    for name in removed:
        (shared_memory / name).unlink(missing_ok=True)
    for port in estate.queue_ports:
        Path(f"/tmp/fd_weight_clear_update_lock__pid{estate.port}_port{port}.lock").unlink(missing_ok=True)
    shutil.rmtree(estate.run_directory, ignore_errors=True)
    return removed


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    estate = Estate.loads(sys.argv[1])
    sys.stdin.buffer.read()
    end_processes(estate.run_directory)
    remove_files(estate)


if __name__ == "__main__":
    main()
