"""CPU of the worker's thread per step inside FastDeploy: what a batch with copies costs, and a pass while copies run.

The real `WorkerCache` and `CudaRuntime` over a GPU that does nothing (`null_gpu.py`), so all that is left is the
bookkeeping; what the copies of a layer cost to submit is measured by `copy_ops.py` and `copy_gpu.py`. Every step
brings copies, and those of three steps are in flight.

`python benchmarks/worker_steps.py [NAME]` writes `results/NAME.json`. With another checkout first on `PYTHONPATH`
that one is measured: `worker_steps_before` is commit 2a3fcbf.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import null_gpu
import numpy as np
from _support import median, percentile, save

import fastdeploy_kvcache_v1
from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import MAIN, WorkerCache
from fastdeploy_kvcache_v1.metadata import CacheLevel, CacheSwapMetadata, SwapStep
from fastdeploy_kvcache_v1.swap_message import SwapEncoder
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.runtime import CudaRuntime

LAYERS, BLOCK_SIZE, ROW_BYTES = 48, 64, 16 << 10
DEVICE_SLOTS, HOST_SLOTS = 40_000, 60_000
ROWS, ROW_BLOCKS = 64, 256
STEPS, WARM_UP = 200, 20
ROWS_ATTRIBUTE = "_kvcache_v1_rows"
"""As `transport.ROWS_ATTRIBUTE`; older checkouts do not know it."""

COPIES = {
    "16 in": (0, 16),
    "64 out, 64 in": (64, 64),
    "2,000 in": (0, 2000),
    "1,000 out, 1,000 in": (1000, 1000),
    "2,000 out, 2,000 in": (2000, 2000),
}
"""Blocks per step. What is swapped in goes where the evictions of the step make room."""


class _Tensor:
    def __init__(self, address: int) -> None:
        self.shape, self._address = [DEVICE_SLOTS, 1, BLOCK_SIZE, 128], address
        self.place = SimpleNamespace(is_gpu_place=lambda: True, is_cpu_place=lambda: False)

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self._address


def make_cache() -> WorkerCache:
    runtime: Any = CudaRuntime(0, compute_handle=0x77)
    runtime.allocate_host = lambda nbytes, **_: SimpleNamespace(
        array=np.zeros(1, np.uint8), address=1 << 45, nbytes=nbytes
    )
    runtime.free_host = lambda buffer: None
    runtime.require_memory = lambda **_: None
    for op in ("swap_cache_per_layer", "swap_cache_all_layers"):
        ops.install(op, "cuda", ops.Implementation("nothing", null_gpu.copy))
    cache = WorkerCache(num_host_blocks=HOST_SLOTS, block_size=BLOCK_SIZE, make_runtime=lambda: runtime)
    backend = GQACacheBackend(LAYERS, 1, 128, BLOCK_SIZE, "bfloat16")
    tensors = {
        f"{role}{layer}": _Tensor((1 << 40) + (2 * layer + place) * DEVICE_SLOTS * ROW_BYTES)
        for layer in range(LAYERS)
        for place, role in enumerate("kv")
    }
    cache.register(MAIN, backend.layout, tensors, DEVICE_SLOTS)
    return cache


def task(kind: int, index: int, table: list[int], end: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        task_type=SimpleNamespace(value=kind),
        idx=index,
        block_tables=table,
        prefill_start_index=0,
        prefill_end_index=end,
    )


def run(num_rows: int, out: int, into: int) -> dict[str, Any]:
    """Steps of `out` evictions and `into` swap-ins beside `num_rows` rows that decode."""
    rng, cache, encoder = np.random.default_rng(1), make_cache(), SwapEncoder()
    slots = rng.permutation(DEVICE_SLOTS).tolist()
    tables = [[slots.pop() for _ in range(ROW_BLOCKS)] for _ in range(num_rows)]
    tokens = (ROW_BLOCKS - 8) * BLOCK_SIZE
    cache.receive([task(0, index, table, tokens) for index, table in enumerate(tables)] or [task(1, 0, [slots[0]])])
    cache.begin_forward(layer_by_layer=True)
    cache.end_forward()
    free = np.array(slots)
    times: dict[str, list[float]] = {"receive": [], "pass": [], "layer waits": []}
    queries: dict[str, list[int]] = {name: [] for name in times}
    gc.collect()
    gc.disable()
    for number in range(STEPS):
        null_gpu.Clock.step += 1
        batch = _batch(number, encoder, rng, free, tables, tokens + number, out, into)
        for name, spent, calls in _step(cache, batch):
            if number >= WARM_UP:
                times[name].append(spent)
                queries[name].append(calls["eventQuery"])
    gc.enable()
    return {
        name: {
            "least_us": 1e6 * min(values),
            "median_us": 1e6 * median(values),
            "p10_us": 1e6 * percentile(values, 0.1),
            "p90_us": 1e6 * percentile(values, 0.9),
            "event_queries": median(queries[name]),
            "most_event_queries": max(queries[name]),
        }
        for name, values in times.items()
    }


def _batch(
    number: int, encoder: SwapEncoder, rng: Any, free: Any, tables: list[list[int]], tokens: int, out: int, into: int
) -> list[SimpleNamespace]:
    """One decode task, as when one row gets another block, which carries the step."""
    chosen = rng.permutation(free)[: max(out, into)].tolist()
    host = rng.permutation(HOST_SLOTS)[: out + into].tolist()
    carrier = task(1, 0, tables[0] if tables else [int(free[0])])
    device_to_host = CacheSwapMetadata(CacheLevel.DEVICE, CacheLevel.HOST, tuple(chosen[:out]), tuple(host[:out]))
    host_to_device = CacheSwapMetadata(CacheLevel.HOST, CacheLevel.DEVICE, tuple(host[out:]), tuple(chosen[:into]))
    setattr(carrier, SWAP_ATTRIBUTE, encoder.encode(SwapStep.of(number, device_to_host, host_to_device)))
    setattr(carrier, ROWS_ATTRIBUTE, tuple((index, tokens) for index in range(len(tables))))
    return [carrier]


def _step(cache: WorkerCache, batch: list[SimpleNamespace]) -> Iterator[tuple[str, float, Counter[str]]]:
    """What a step spends: seconds of CPU and driver calls."""

    def measured(run: Callable[[], object]) -> tuple[float, Counter[str]]:
        before, start = null_gpu.calls.copy(), time.thread_time()
        run()
        return time.thread_time() - start, null_gpu.calls - before

    yield "receive", *measured(lambda: cache.receive(batch))
    begun = measured(lambda: cache.begin_forward(layer_by_layer=True))
    waits = cache.current_counter

    def wait() -> None:
        for layer in range(LAYERS):
            if waits is not None:
                waits.wait_for_layer(layer)

    yield "layer waits", *measured(wait)
    ended = measured(cache.end_forward)
    yield "pass", begun[0] + ended[0], begun[1] + ended[1]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "worker_steps"
    null_gpu.enter()
    measured = Path(fastdeploy_kvcache_v1.__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "-C", str(measured), "describe", "--always"], capture_output=True, text=True, check=False
    )
    save(
        name,
        {
            "measured_commit": commit.stdout.strip() or None,
            "layers": LAYERS,
            "steps": STEPS - WARM_UP,
            "steps_in_flight": null_gpu.STEPS_IN_FLIGHT,
            "blocks_of_a_row": ROW_BLOCKS,
            "cases": [
                {"rows": rows, "copies": copies, **run(rows, *blocks)}
                for copies, blocks in COPIES.items()
                for rows in (0, ROWS)
            ],
        },
    )


if __name__ == "__main__":
    main()
