"""CPU copies of cache blocks: the compiled core against memcpy, NumPy and itself on two queues.

Device side: one dense tensor. Host side: a block-major pool with two rows per block, so that no two blocks are
neighbours. Contenders take turns on the same slots; what counts is the median of the ratios of single turns.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from _support import median, save
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps, Path
from fastdeploy_kvcache_v1.worker.ops.queues import Queue

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRun, CopyRuns, numpy_twin, plan_runs

BYTES = 128 << 20
"""Of each side; far more than the caches hold."""

BLOCK_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
TURNS = 11


class Case(NamedTuple):
    block_bytes: int
    pattern: str
    direction: str


class Bench:
    """Memory and contenders of one block size."""

    def __init__(self, core: CompiledOps, block_bytes: int) -> None:
        self.core = core
        self.blocks = BYTES // block_bytes
        self.device = np.ones((self.blocks, block_bytes), np.uint8)
        pool = ops.host_alloc(2 * BYTES).array
        pool[:] = 2
        self.host = pool.reshape(self.blocks, 2, block_bytes)[:, 1]
        self.queues = [Queue(core.library, f"bench-{number}") for number in range(2)]

    def close(self) -> None:
        for queue in self.queues:
            queue.close()

    def contenders(self, case: Case) -> dict[str, Callable[[], None]]:
        rng = np.random.default_rng(0)
        order = np.arange(self.blocks) if case.pattern == "contiguous" else rng.permutation(self.blocks)
        slots = np.arange(self.blocks) if case.pattern == "contiguous" else rng.permutation(self.blocks)
        to, of = (self.device, self.host) if case.direction == "swap-in" else (self.host, self.device)
        targets, sources = (_rows(to),), (_rows(of),)
        runs = plan_runs(order.tolist(), slots.tolist(), num_sources=self.blocks, num_targets=self.blocks)
        middle = self.blocks // 2
        halves = [
            plan_runs(order[part].tolist(), slots[part].tolist(), num_sources=self.blocks, num_targets=self.blocks)
            for part in (slice(0, middle), slice(middle, None))
        ]

        def copy(path: Path) -> Callable[[], None]:
            return lambda: self.core.swap_cache_per_layer(targets, sources, runs, 0, path)

        def on_queues(parts: list[CopyRuns], path: Path = Path.AUTO) -> None:
            for queue, part in zip(self.queues, parts, strict=False):
                self.core.swap_cache_per_layer(targets, sources, part, queue.id, path)
            for event in [queue.record() for queue in self.queues]:
                event.wait(-1)

        def fancy() -> None:
            to[slots] = of[order]

        return {
            "memcpy": copy(Path.MEMCPY),
            "memcpy on two threads": lambda: on_queues(halves, Path.MEMCPY),
            "compiled": copy(Path.AUTO),
            "one queue": lambda: on_queues([runs]),
            "two queues": lambda: on_queues(halves),
            "numpy twin": lambda: numpy_twin.swap_cache_per_layer(targets, sources, runs, 0),
            "numpy fancy indexing": fancy,
        }


def _rows(array: np.ndarray) -> BlockRows:
    return BlockRows(array.ctypes.data, array.shape[0], array.shape[1], array.strides[0], owner=array)


def measure(bench: Bench, case: Case) -> dict[str, Any]:
    contenders = bench.contenders(case)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(TURNS + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)

    def ratio(slower: str, faster: str) -> float:
        return median(a / b for a, b in zip(seconds[slower], seconds[faster], strict=True))

    return {
        **case._asdict(),
        "gb_per_s": {name: BYTES / median(times) / 1e9 for name, times in seconds.items()},
        "compiled_over_memcpy": ratio("memcpy", "compiled"),
        "two_queues_over_one": ratio("one queue", "two queues"),
        "two_memcpy_threads_over_one": ratio("memcpy", "memcpy on two threads"),
        "compiled_over_fancy_indexing": ratio("numpy fancy indexing", "compiled"),
        "compiled_over_numpy_twin": ratio("numpy twin", "compiled"),
    }


def parallel_queues(core: CompiledOps) -> float:
    """Two queues over one for copies that stay in the caches: what the queues allow, whatever the memory does."""
    copies, block = 10_000, 8 << 10
    memory = [[np.ones((16, block), np.uint8) for _side in range(2)] for _queue in range(2)]
    queues = [Queue(core.library, f"parallel-{number}") for number in range(2)]
    runs = CopyRuns.of([CopyRun(slot, 15 - slot, 1) for slot in range(16)])

    def seconds(count: int) -> float:
        gate = threading.Event()  # so that enqueueing does not count
        for queue, (to, of) in zip(queues[:count], memory, strict=False):
            queue.call(gate.wait)
            for _copy in range(copies // count):
                core.swap_cache_per_layer((_rows(to),), (_rows(of),), runs, queue.id)
        events = [queue.record() for queue in queues]
        start = time.perf_counter()
        gate.set()
        for event in events:
            event.wait(-1)
        return time.perf_counter() - start

    ratio = median(seconds(1) / seconds(2) for _turn in range(TURNS))
    for queue in queues:
        queue.close()
    return ratio


def submission_us(core: CompiledOps) -> dict[str, float]:
    """Time to enqueue one layer of 256 scattered blocks: what the thread of the engine pays."""
    device = [np.zeros((256, 64), np.uint8) for _role in range(2)]
    host = np.zeros((256, 2, 64), np.uint8)
    targets = tuple(_rows(array) for array in device)
    sources = tuple(_rows(host[:, role]) for role in range(2))
    order = np.random.default_rng(0).permutation(256).tolist()
    queue = Queue(core.library, "submission")
    first, later = [], []
    for _turn in range(200):
        runs = plan_runs(list(range(256)), order, num_sources=256, num_targets=256)
        for times in (first, later):  # the first layer of a swap-in checks the runs for all of them
            start = time.perf_counter()
            ops.swap_cache_per_layer(targets, sources, runs, stream=queue.id)
            times.append((time.perf_counter() - start) * 1e6)
    queue.close()
    return {"first_layer": median(first), "later_layers": median(later)}


def main() -> None:
    if ops.COMPILED is None:
        sys.exit("error: there is no compiled core: python custom_ops/build.py")
    cases = []
    for block_bytes in BLOCK_SIZES:
        bench = Bench(ops.COMPILED, block_bytes)
        for pattern in ("contiguous", "scattered"):
            for direction in ("swap-in", "swap-out"):
                cases.append(measure(bench, Case(block_bytes, pattern, direction)))
        bench.close()
    save(
        "copy_ops",
        {
            "bytes_per_copy": BYTES,
            "turns": TURNS,
            "submission_of_256_blocks_us": submission_us(ops.COMPILED),
            "two_queues_over_one_in_cache": parallel_queues(ops.COMPILED),
            "cases": cases,
        },
    )


if __name__ == "__main__":
    main()
