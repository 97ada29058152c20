"""Placement of the host tier's pages: near the GPU or CPUs that use them, before the first copy.

A page gets its place at the first touch. Otherwise each page's first copy would wait for the kernel to clear it, on any
node.
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
"""Bytes per task of a thread."""

MAX_THREADS = 16
REPORT_EVERY_S = 5.0


def allocate_near(nbytes: int, cpus: Set[int] = frozenset(), *, shared: bool = False) -> ops.HostBuffer:
    """Allocate host memory with all pages, best effort on the NUMA node of `cpus`. Raises as `ops.host_alloc`."""
    buffer = ops.host_alloc(nbytes, shared=shared)
    touch(buffer.array, cpus)
    return buffer


def cpus_near(bus_id: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """CPUs of the NUMA node of a PCI device; empty if unknown, or if it has all CPUs."""
    cpus: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        listed = (sysfs / "bus/pci/devices" / bus_id.lower() / "local_cpulist").read_text(encoding="ascii")
        for part in filter(None, listed.strip().split(",")):  # `0-3,8`
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus if len(cpus) < (os.cpu_count() or 1) else ())


def touch(memory: ByteRows, cpus: Set[int] = frozenset()) -> None:
    """Touch every page of the zeroed `memory`, from `cpus` where given and allowed."""
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
                logger.info("host memory: %d of %d MiB allocated", touched >> 20, memory.size >> 20)
    finally:  # an interrupt drops waiting chunks
        threads.shutdown(cancel_futures=True)
    logger.info("host memory: %d MiB allocated in %.1f s", memory.size >> 20, time.monotonic() - started)


def _run_on(cpus: Set[int]) -> None:
    """Pin this thread to `cpus`, whose node then gives its pages; some containers forbid it."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), cpus)


def _touch(chunk: ByteRows) -> int:
    chunk[:: mmap.PAGESIZE] = 0  # NumPy gives up the GIL for it
    return chunk.size
