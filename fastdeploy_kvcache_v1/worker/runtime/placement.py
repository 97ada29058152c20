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
from collections.abc import Callable, Mapping, Set
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

Nodes = Mapping[int, Set[int]]
"""CPUs by NUMA node."""


def allocate_near(nbytes: int, choose: Callable[[Nodes], int | None], *, shared: bool = False) -> ops.HostBuffer:
    """Host memory with all its pages, on the NUMA node that `choose` names: only asked where there are several.
    `shared`: other processes can map it.

    Best effort: what a container forbids, or a full node cannot give, is one log line. Raises as `ops.host_alloc`.
    """
    nodes = numa_nodes()
    node = choose(nodes) if len(nodes) > 1 else None
    buffer = ops.host_alloc_shared(nbytes) if shared else ops.host_alloc(nbytes)
    touch(buffer.array, frozenset() if node is None else nodes.get(node, frozenset()))
    return buffer


def numa_nodes(sysfs: Path = SYSFS) -> dict[int, frozenset[int]]:
    """Nodes that have CPUs; empty where the system does not tell."""
    nodes = {}
    for directory in sysfs.glob("devices/system/node/node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if cpus := _parse_cpus((directory / "cpulist").read_text(encoding="ascii")):
                nodes[int(directory.name.removeprefix("node"))] = cpus
    return nodes


def _parse_cpus(text: str) -> frozenset[int]:
    """The kernel's lists: `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_of_this_process(nodes: Nodes) -> int | None:
    """The node that has every CPU this process may run on; None when they are of several."""
    allowed = os.sched_getaffinity(0)
    return next((node for node, cpus in nodes.items() if allowed <= cpus), None)


def node_of_pci_device(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """None where the system does not tell."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


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
