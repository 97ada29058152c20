"""Where the pages of the host tier lie: near the GPU or the CPUs that use them, and there before the first copy.

A page gets its place when it is first touched. Left to the copies, each page's first copy waits for the kernel to find
and clear it, on whichever node it happens to run.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .. import ops
from ..ops.rows import ByteRows

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")

CHUNK = 64 << 20
"""Bytes that a thread touches at a time."""

MAX_THREADS = 16
REPORT_EVERY_S = 5.0


def allocate_near(nbytes: int, cpus: Set[int] = frozenset(), *, shared: bool = False) -> ops.HostBuffer:
    """Host memory with all its pages, on the NUMA node of `cpus` where these are given. `shared`: other processes can
    map it.

    Best effort: what a container forbids, or a full node cannot give, is one log line. Raises as `ops.host_alloc`.
    """
    buffer = ops.host_alloc(nbytes, shared=shared)
    touch(buffer.array, cpus)
    return buffer


def cpus_near(bus_id: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """Of the NUMA node of a PCI device; empty where the system does not tell, or where all of them are."""
    cpus: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        listed = (sysfs / "bus/pci/devices" / bus_id.lower() / "local_cpulist").read_text(encoding="ascii")
        for part in filter(None, listed.strip().split(",")):  # `0-3,8`
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus if len(cpus) < (os.cpu_count() or 1) else ())


def touch(memory: ByteRows, cpus: Set[int] = frozenset()) -> None:
    """Have the system give every page of `memory`, which is all zero, now; from `cpus` where given and allowed."""
    chunks = [memory[start : start + CHUNK] for start in range(0, memory.size, CHUNK)]
    num_threads = min(len(chunks), MAX_THREADS, len(cpus or os.sched_getaffinity(0)))
    started = time.monotonic()
    report_at, touched = started + REPORT_EVERY_S, 0
    threads = ThreadPoolExecutor(num_threads, "host-pages", initializer=_run_on, initargs=(cpus,))
    try:
        for done in as_completed([threads.submit(_touch, chunk) for chunk in chunks]):
            touched += done.result()
            if time.monotonic() >= report_at:
                report_at += REPORT_EVERY_S
                logger.info("host memory: %d of %d MiB are there", touched >> 20, memory.size >> 20)
    finally:  # an interrupt drops the pages that no thread has started
        threads.shutdown(cancel_futures=True)
    logger.info("host memory: %d MiB in %.1f s", memory.size >> 20, time.monotonic() - started)


def _run_on(cpus: Set[int]) -> None:
    """This thread's pages come from the node of `cpus`; forbidden in some containers."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), cpus)


def _touch(chunk: ByteRows) -> int:
    chunk[:: mmap.PAGESIZE] = 0  # NumPy gives up the GIL for it
    return chunk.size
