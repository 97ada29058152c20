"""Clean up after a server: end every process below this one and remove its files.

Orphans become children of this process. Files in /dev/shm have the server's ports in their names. Python's resource
trackers, which outlive their processes for a moment, remove those with random names.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
KILL_TIMEOUT_S = 10.0
TRACKER = "multiprocessing.resource_tracker"
TRACKER_TIMEOUT_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


def remove_files(
    run_directory: Path, ports: Sequence[int], queue_ports: Sequence[int], shared_memory: Path = SHARED_MEMORY
) -> None:
    """Remove the files of one server. All its names in /dev/shm have one of its ports."""
    names = []
    for port in ports:
        names += [f"{port}.socket", f"router_{port}.ipc", f"response_{port}_w*.pull"]
    for queue_port in queue_ports:
        names += [f"*.{queue_port}", f"fmq_ctrl_*_rank*_{queue_port}.ipc", f"fd_task_queue_{queue_port}.sock"]
    for port, queue_port in product(ports, queue_ports):
        Path(f"/tmp/fd_weight_clear_update_lock__pid{port}_port{queue_port}.lock").unlink(missing_ok=True)
    for name in names:
        for path in list(shared_memory.glob(name)):
            path.unlink(missing_ok=True)
    shutil.rmtree(run_directory, ignore_errors=True)


def adopt_orphans() -> None:
    """Orphans below this process become its children (Linux only, as FastDeploy)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_processes() -> int:
    """Kill all processes below this one, new ones included. Returns their number.

    Resource trackers come last: they end by themselves after removing the shared memory and semaphores that their
    processes left.
    """
    count = _kill(trackers=False)
    deadline = time.monotonic() + TRACKER_TIMEOUT_S
    while any(map(_is_tracker, living_processes())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return count + _kill(trackers=True)


def _kill(*, trackers: bool) -> int:
    count, deadline = 0, time.monotonic() + KILL_TIMEOUT_S
    spared: set[psutil.Process] = set()  # an ending tracker no longer looks like one
    while time.monotonic() < deadline:
        living = living_processes()
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


def living_processes() -> set[psutil.Process]:
    """Processes below this one, without zombies, which only their parents can end."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return TRACKER in " ".join(process.cmdline())
    except psutil.Error:  # gone, or a zombie
        return False
