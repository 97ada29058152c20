"""Rates of CPU copies of blocks in C and by NumPy, over `memmove` per block and over NumPy's fancy indexing.
One thread copies 128 MiB between a dense tensor and a pool, in turns; ratios are medians over single turns.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from _support import begin, median, sized

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, LayerRows, copies, plan_spans

BYTES = sized(128 << 20, 4 << 20)
"""Of each side, far more than the processor's caches hold."""

BLOCK_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
TURNS = sized(11, 1)


class Case(NamedTuple):
    block_bytes: int
    pattern: str
    direction: str


class Memory:
    """Both sides, for blocks of one size."""

    def __init__(self, block_bytes: int) -> None:
        self.blocks = BYTES // block_bytes
        self.device = np.ones((self.blocks, block_bytes), np.uint8)
        pool = ops.host_alloc(2 * BYTES).array
        pool[:] = 2  # two rows a block, so that no two blocks are neighbours
        self.host = pool.reshape(self.blocks, 2, block_bytes)[:, 1]

    def contenders(self, case: Case) -> dict[str, Callable[[], None]]:
        rng, every = np.random.default_rng(0), np.arange(self.blocks)
        order, slots = (every if case.pattern == "contiguous" else rng.permutation(self.blocks) for _ in range(2))
        to_device = case.direction == "swap-in"
        to, of = (self.device, self.host) if to_device else (self.host, self.device)
        spans = plan_spans(order.tolist(), slots.tolist(), num_sources=self.blocks, num_targets=self.blocks)
        tiers = [[LayerRows([_rows(array)])] for array in (self.device, self.host)]
        by_c = copies.CpuCopies(*tiers)
        with mock.patch.object(copies, "library", return_value=None):
            by_numpy = copies.CpuCopies(*tiers)
        addresses = [(to[slot].ctypes.data, of[block].ctypes.data) for block, slot in zip(order, slots, strict=True)]

        def memcpy() -> None:
            for target, source in addresses:
                ctypes.memmove(target, source, case.block_bytes)

        def fancy() -> None:
            to[slots] = of[order]

        return {
            "memcpy": memcpy,
            "c": lambda: by_c.all_layers(None, spans, to_device=to_device),
            "numpy": lambda: by_numpy.all_layers(None, spans, to_device=to_device),
            "numpy fancy indexing": fancy,
        }


def _rows(array: np.ndarray) -> BlockRows:
    return BlockRows(array.ctypes.data, array.shape[0], array.shape[1], array.strides[0], owner=array)


def measure(memory: Memory, case: Case) -> dict[str, Any]:
    contenders = memory.contenders(case)
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
        "c_over_memcpy": ratio("memcpy", "c"),
        "numpy_over_memcpy": ratio("memcpy", "numpy"),
        "c_over_fancy_indexing": ratio("numpy fancy indexing", "c"),
    }


def main() -> None:
    run = begin()
    if copies.library() is None:
        sys.exit("error: the copies in C are not built: ./scripts/build_ops.sh cpu")
    cases = []
    for block_bytes in BLOCK_SIZES:
        memory = Memory(block_bytes)
        for pattern, direction in product(("contiguous", "scattered"), ("swap-in", "swap-out")):
            cases.append(measure(memory, Case(block_bytes, pattern, direction)))
    run.save({"bytes_per_copy": BYTES, "turns": TURNS, "cases": cases})


if __name__ == "__main__":
    main()
