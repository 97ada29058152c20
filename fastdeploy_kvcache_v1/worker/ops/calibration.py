"""The constants of the cost model, measured on this GPU in some milliseconds: few copies, timed by CUDA events.

The model is in `custom_ops/cuda/costs.cc`, what each constant means in `kvswap.h`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from .compiled import CompiledOps, Costs, Path
from .host_memory import HostBuffer
from .rows import BlockRows, CopyRun, CopyRuns, LayerRows

logger = logging.getLogger(__name__)

ROW_BYTES = 16 << 10
SLOTS = 256
BYTES = SLOTS * ROW_BYTES
"""Of either tier; a smaller host pool is not measured."""

COPIES = 64
REPEATS = 3
FAR_OFF = 16.0
"""A number so many times above or below the one of the table is taken for a disturbed measurement."""


class Timing(NamedTuple):
    """The best of some turns."""

    thread_ns: float
    gpu_ns: float


class Shapes(NamedTuple):
    """The same bytes in different pieces."""

    whole: CopyRuns
    row: CopyRuns
    strided: CopyRuns
    """One copy of `COPIES` rows."""
    scattered: CopyRuns
    """`COPIES` rows that nothing joins."""


def shapes() -> Shapes:
    order = np.random.default_rng(0).permutation(SLOTS // 2)[:COPIES]
    scattered = [CopyRun(2 * int(slot), 2 * (COPIES - 1 - i) + i % 2, 1) for i, slot in enumerate(np.sort(order))]
    strided = [CopyRun(2 * i, i, 1) for i in range(COPIES)]
    return Shapes(
        CopyRuns.of([CopyRun(0, 0, SLOTS)]),
        CopyRuns.of([CopyRun(0, 0, 1)]),
        CopyRuns.of(strided),
        CopyRuns.of(scattered),
    )


def calibrate(compiled: CompiledOps, cupy: Any, host: HostBuffer, live: Collection[str]) -> bool:
    """Measure what the `live` paths cost, both directions, on the first `BYTES` of the page-locked `host`. False, with
    the constants as they were, where that is not possible."""
    if host.nbytes < BYTES:
        return False
    runtime = cupy.cuda.runtime
    try:
        scratch = int(runtime.malloc(2 * BYTES))
    except Exception as error:
        logger.warning("the copy paths are not timed, the GPU gives no memory for it: %s", error)
        return False
    try:
        stream = cupy.cuda.Stream(non_blocking=True)
        for to_device in (True, False):
            costs = _measure(compiled, cupy, stream, host.address, scratch, live, to_device)
            compiled.set_costs(costs, to_device=to_device)
    except Exception as error:  # a GPU that cannot be timed still copies
        logger.warning("the copy paths could not be timed, the constants of the table hold: %s", error)
        return False
    finally:
        with contextlib.suppress(RuntimeError):  # a GPU that an error broke takes nothing back
            runtime.free(scratch)  # waits for the GPU
    return True


def _measure(
    compiled: CompiledOps, cupy: Any, stream: Any, host: int, scratch: int, live: Collection[str], to_device: bool
) -> Costs:
    on_device = BlockRows(scratch, SLOTS, ROW_BYTES, ROW_BYTES, on_gpu=True)
    on_host = BlockRows(host, SLOTS, ROW_BYTES, ROW_BYTES)
    target, source = (on_device, on_host) if to_device else (on_host, on_device)
    beside = BlockRows(scratch + BYTES, SLOTS, ROW_BYTES, ROW_BYTES)  # as if it were the host's

    def timed(path: Path, runs: CopyRuns, to: BlockRows = target) -> Timing:
        targets, sources = LayerRows([to]), LayerRows([source])
        copy = compiled.swap_cache_per_layer
        return best_time(cupy, stream, lambda: copy(targets, sources, runs, int(stream.ptr), path))

    table, shape, found = compiled.costs(to_device=to_device), shapes(), {}
    some = COPIES * ROW_BYTES
    whole, row, one, many = (
        timed(Path.RUNS, runs) for runs in (shape.whole, shape.row, shape.strided, shape.scattered)
    )
    rate = found["engine_rate"] = _ratio(BYTES - ROW_BYTES, whole.gpu_ns - row.gpu_ns) or table.engine_rate
    found["call_ns"] = many.thread_ns / COPIES
    found["copy_ns"] = (many.gpu_ns - some / rate) / COPIES
    found["row_ns"] = (one.gpu_ns - row.gpu_ns - (some - ROW_BYTES) / rate) / COPIES
    if "batch" in live:
        few, many = timed(Path.BATCH, shape.scattered[:2]), timed(Path.BATCH, shape.scattered)
        found["descriptor_ns"] = (many.thread_ns - few.thread_ns) / (COPIES - 2)
        found["batch_ns"] = few.thread_ns - 2 * found["descriptor_ns"]
        found["batch_copy_ns"] = (many.gpu_ns - some / rate) / COPIES
    if "kernel" in live:
        whole, many = timed(Path.KERNEL, shape.whole), timed(Path.KERNEL, shape.scattered)
        found["launch_ns"] = many.thread_ns
        found["kernel_rate"] = _ratio(BYTES - some, whole.gpu_ns - many.gpu_ns) or table.kernel_rate
        found["kernel_start_ns"] = many.gpu_ns - some / found["kernel_rate"]
        if not to_device:
            inside = timed(Path.KERNEL, shape.whole, beside)
            found["gather_rate"] = _ratio(BYTES, inside.gpu_ns - found["kernel_start_ns"]) or table.gather_rate
    for name, number in found.items():
        known = getattr(table, name)
        if known / FAR_OFF <= number <= known * FAR_OFF:
            setattr(table, name, number)
    return table


def _ratio(nbytes: int, nanoseconds: float) -> float:
    return nbytes / nanoseconds if nanoseconds > 0 else 0.0


def best_time(cupy: Any, stream: Any, submit: Callable[[], None], repeats: int = REPEATS) -> Timing:
    """Of `submit`, which enqueues on `stream`; the first turn is not counted."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    threads, gpus = [], []
    for _turn in range(repeats + 1):
        start.record(stream)
        began = time.perf_counter_ns()
        submit()
        threads.append(time.perf_counter_ns() - began)
        end.record(stream)
        end.synchronize()
        gpus.append(float(cupy.cuda.get_elapsed_time(start, end)) * 1e6)
    return Timing(min(threads[1:]), min(gpus[1:]))
