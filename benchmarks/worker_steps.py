"""CPU time that a step with copies costs the worker's thread: receiving a batch, the pass, and 48 waits for layers.
The real worker runs over a driver whose functions do nothing (`null_gpu.py`), with copies of three steps in flight.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import null_gpu
import numpy as np
from _support import begin, median, percentile, sized

from fastdeploy_kvcache_v1.attention.layouts import GQACacheBackend
from fastdeploy_kvcache_v1.contract.messages import BlockCopies, CacheLevel, SwapStep
from fastdeploy_kvcache_v1.contract.swap_message import SwapEncoder
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import ROWS_ATTRIBUTE, SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import MAIN, WorkerCache
from fastdeploy_kvcache_v1.worker.cuda.rates import KERNEL, Rates, Timing
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime

LAYERS, BLOCK_SIZE, ROW_BYTES = 48, 64, 16 << 10
POOLS = {"small": (2_000, 4_000), "usual": (40_000, 60_000), "large": (200_000, 1_000_000)}
"""Slots of the device and of the host. The large ones show that cost does not grow."""

ROW_BLOCKS = 256
STEPS, WARM_UP = sized((200, 20), (2, 1))
BATCHES = {
    "16 in": (0, 16),
    "64 out, 64 in": (64, 64),
    "2,000 in": (0, 2000),
    "1,000 out, 1,000 in": (1000, 1000),
    "2,000 out, 2,000 in": (2000, 2000),
}
"""Blocks that a step copies to the host and from it. Copies in go to slots that the step's copies out free."""

CASES = [("usual", batch, rows) for batch in BATCHES for rows in (0, 64)]
CASES += [(pools, batch, 4) for batch in ("16 in", "64 out, 64 in") for pools in POOLS]
CASES = sized(CASES, CASES[:1])


class _Tensor:
    def __init__(self, slots: int, address: int) -> None:
        self.shape, self._address = [slots, 1, BLOCK_SIZE, 128], address
        self.place = SimpleNamespace(is_gpu_place=lambda: True, is_cpu_place=lambda: False)

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self._address


def make_cache(device_slots: int, host_slots: int) -> WorkerCache:
    only_the_kernel = Rates({KERNEL: [[Timing(1024, 1.0, 1.0)]] * 2}, reach=1 << 50)
    runtime: Any = CudaRuntime(0, compute_handle=0x77, rates=only_the_kernel)
    runtime.allocate_host = lambda nbytes, **_: SimpleNamespace(
        array=np.zeros(1, np.uint8), address=1 << 45, nbytes=nbytes
    )
    runtime.free_host = lambda buffer: None
    runtime.require_memory = lambda **_: None
    make_copies = runtime.new_copies

    def new_copies(*layers: Any) -> Any:
        copies = make_copies(*layers)
        assert not copies.left, copies.left  # else the kernel is not used
        return copies

    runtime.new_copies = new_copies
    cache = WorkerCache(num_host_blocks=host_slots, block_size=BLOCK_SIZE, make_runtime=lambda: runtime)
    backend = GQACacheBackend(LAYERS, 1, 128, BLOCK_SIZE, "bfloat16")
    tensors = {
        f"{role}{layer}": _Tensor(device_slots, (1 << 40) + (2 * layer + place) * device_slots * ROW_BYTES)
        for layer in range(LAYERS)
        for place, role in enumerate("kv")
    }
    cache.register(MAIN, backend.layout, tensors, device_slots)
    return cache


def task(kind: int, index: int, table: list[int], end: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        task_type=SimpleNamespace(value=kind),
        idx=index,
        block_tables=table,
        prefill_start_index=0,
        prefill_end_index=end,
    )


def run(pools: str, batch: str, num_rows: int) -> dict[str, Any]:
    """Times of steps of one kind, beside `num_rows` rows that decode."""
    (device_slots, host_slots), (out, into) = POOLS[pools], BATCHES[batch]
    rng, cache, encoder = Random(1), make_cache(device_slots, host_slots), SwapEncoder()
    slots = rng.sample(range(device_slots), device_slots)
    tables = [[slots.pop() for _ in range(ROW_BLOCKS)] for _ in range(num_rows)]
    tokens = (ROW_BLOCKS - 8) * BLOCK_SIZE
    cache.receive([task(0, index, table, tokens) for index, table in enumerate(tables)] or [task(1, 0, [slots[0]])])
    cache.begin_forward(layer_by_layer=True)
    cache.end_forward()
    times: dict[str, list[float]] = {"receive": [], "pass": [], "layer waits": []}
    queries: dict[str, list[int]] = {name: [] for name in times}
    gc.collect()
    gc.disable()
    for number in range(STEPS):
        null_gpu.Clock.step += 1
        free, host = rng.sample(slots, max(1, out, into)), rng.sample(range(host_slots), out + into)
        tasks = _tasks(number, encoder, free, host, tables, tokens + number, (out, into))
        for name, spent, calls in _step(cache, tasks):
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


def _tasks(
    number: int,
    encoder: SwapEncoder,
    free: list[int],
    host: list[int],
    tables: list[list[int]],
    tokens: int,
    blocks: tuple[int, int],
) -> list[SimpleNamespace]:
    """One decode task that carries the step, as when a row gets another block."""
    out, into = blocks
    carrier = task(1, 0, tables[0] if tables else free[:1])
    device_to_host = BlockCopies(CacheLevel.DEVICE, CacheLevel.HOST, tuple(free[:out]), tuple(host[:out]))
    host_to_device = BlockCopies(CacheLevel.HOST, CacheLevel.DEVICE, tuple(host[out:]), tuple(free[:into]))
    setattr(carrier, SWAP_ATTRIBUTE, encoder.encode(SwapStep.of(number, device_to_host, host_to_device)))
    setattr(carrier, ROWS_ATTRIBUTE, tuple((index, tokens) for index in range(len(tables))))
    return [carrier]


def _step(cache: WorkerCache, batch: list[SimpleNamespace]) -> Iterator[tuple[str, float, Counter[str]]]:
    """CPU seconds and driver calls of each part of a step."""

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
    started = begin()
    with TemporaryDirectory() as directory:
        null_gpu.enter(Path(directory))
        cases = [
            {"pools": pools, "copies": batch, "rows": rows, **run(pools, batch, rows)} for pools, batch, rows in CASES
        ]
    measured = {"layers": LAYERS, "steps": STEPS - WARM_UP, "steps_in_flight": null_gpu.STEPS_IN_FLIGHT}
    started.save({**measured, "pools": POOLS, "blocks_of_a_row": ROW_BLOCKS, "cases": cases})


if __name__ == "__main__":
    main()
