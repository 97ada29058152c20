"""GPU copies of cache blocks against one pinned cudaMemcpyAsync of the same size. Needs CuPy, no Paddle.

Per block size and pattern: H2D and D2H of every path; then both directions at once, a compute kernel beside the
copies, and the CPU time to submit a layer. Times are of CUDA events; contenders take turns, medians count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from _support import median, rounded, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.gpu.device import Copy, device_rows, host_rows, implementations, kernel, page_locked

BYTES = 256 << 20
BLOCK_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
RUN = 16
TURNS = 7
ROLES = 2
H2D, D2H = 1, 2

Submit = Callable[[Any], None]
"""Enqueues on a CuPy stream."""


def seconds_on(stream: Any, submit: Submit) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    submit(stream)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1000


class Bench:
    """Both tiers of one block size; rows are half a block, one per role."""

    def __init__(self, pool: np.ndarray, block_bytes: int) -> None:
        self.row = block_bytes
        self.slots = BYTES // (ROLES * block_bytes)
        self.pool = pool
        self.flat = cupy.zeros(BYTES, dtype=cupy.uint8)
        tensors = self.flat.reshape(ROLES, self.slots, block_bytes)
        self.device = [device_rows([tensors[role] for role in range(ROLES)])]
        self.host = host_rows(pool, self.slots, [[block_bytes] * ROLES])
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]

    def runs(self, pattern: str) -> Any:
        from fastdeploy_kvcache_v1.worker.ops import plan_runs

        length = 1 if pattern == "scattered" else min(RUN, self.slots)
        starts = np.random.default_rng(0).permutation(self.slots // length) * length
        sources = (starts[:, None] + np.arange(length)).reshape(-1)
        return plan_runs(
            sources.tolist(), list(range(sources.size)), num_sources=self.slots, num_targets=self.slots
        )  # a run of one slot may meet its neighbour by chance

    def copy(self, copy: Copy, runs: Any, direction: int) -> Submit:
        sides = (self.device, self.host) if direction == H2D else (self.host, self.device)
        return lambda stream: copy(*sides, runs, stream.ptr)

    def plain(self, direction: int) -> Submit:
        """One cudaMemcpyAsync."""
        ends = (self.flat.data.ptr, self.pool.ctypes.data)
        to, of = ends if direction == H2D else ends[::-1]
        return lambda stream: cupy.cuda.runtime.memcpyAsync(to, of, BYTES, direction, stream.ptr)


def rates(bench: Bench, pattern: str) -> list[dict[str, Any]]:
    rows, runs = [], bench.runs(pattern)
    for direction in (H2D, D2H):
        contenders = {"one memcpy": bench.plain(direction)}
        for name, copy in implementations().items():
            contenders[name] = bench.copy(copy, runs, direction)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(TURNS + 1):
            for name, submit in contenders.items():
                seconds = seconds_on(bench.streams[0], submit)
                if turn:
                    times[name].append(seconds)
        plain = times["one memcpy"]
        rows.append(
            {
                "block_bytes": bench.row,
                "pattern": pattern,
                "direction": "H2D" if direction == H2D else "D2H",
                "gb_per_s": {name: BYTES / median(values) / 1e9 for name, values in times.items()},
                "of_one_memcpy": {
                    name: median(a / b for a, b in zip(plain, values, strict=True)) for name, values in times.items()
                },
            }
        )
    return rows


def both_directions(bench: Bench, copy: Copy) -> float:
    """Throughput of H2D and D2H at once, as a multiple of one after the other's mean rate."""
    into, out = cupy.zeros_like(bench.flat), bench.streams
    tensors = into.reshape(ROLES, bench.slots, bench.row)
    other = [device_rows([tensors[role] for role in range(ROLES)])]
    runs = bench.runs("scattered")
    ratios = []
    with page_locked(BYTES) as second_pool:
        second = host_rows(second_pool, bench.slots, [[bench.row] * ROLES])
        submits: list[Submit] = [
            lambda stream: copy(bench.device, bench.host, runs, stream.ptr),
            lambda stream: copy(second, other, runs, stream.ptr),
        ]
        for _turn in range(TURNS):
            apart = sum(seconds_on(out[0], submit) for submit in submits)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(out[0])
            out[1].wait_event(start)
            submits[0](out[0])
            submits[1](out[1])
            out[0].wait_event(out[1].record())
            end.record(out[0])
            end.synchronize()
            ratios.append(apart / (cupy.cuda.get_elapsed_time(start, end) / 1000))
    return median(ratios)


def compute_slowdown(bench: Bench, copy: Copy) -> float:
    """Share by which a kernel that fills the GPU with arithmetic takes longer while copies run."""
    work, blocks = kernel("compute"), 2048
    out, runs = cupy.zeros(blocks * 256, dtype=cupy.float32), bench.runs("scattered")
    compute, into, back = bench.streams

    def busy(stream: Any) -> None:
        with stream:
            work((blocks,), (256,), (out, np.int32(200_000)))

    slower = []
    for _turn in range(TURNS):
        alone = seconds_on(compute, busy)
        for _repeat in range(max(1, int(alone / (BYTES / 20e9)))):
            copy(bench.device, bench.host, runs, into.ptr)
            copy(bench.host, bench.device, runs, back.ptr)
        slower.append(seconds_on(compute, busy) / alone - 1)
        into.synchronize()
        back.synchronize()
    return median(slower)


def submission_us(bench: Bench, copy: Copy) -> float:
    """CPU time to submit one layer of 256 scattered blocks, with the runs already checked."""
    runs = bench.runs("scattered")[:256]
    times = []
    for _turn in range(50):
        start = time.perf_counter()
        copy(bench.device, bench.host, runs, bench.streams[0].ptr)
        times.append((time.perf_counter() - start) * 1e6)
        bench.streams[0].synchronize()
    return median(times)


def table(result: dict[str, Any]) -> str:
    lines = [
        "| block | pattern | direction | one memcpy GB/s | auto GB/s | auto / one memcpy |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rates"]:
        rate = row["gb_per_s"]
        lines.append(
            f"| {row['block_bytes'] >> 10} KB | {row['pattern']} | {row['direction']} | {rate['one memcpy']:.1f} "
            f"| {rate['auto']:.1f} | {row['of_one_memcpy']['auto']:.2f} |"
        )
    lines += [f"{name}: {value}" for name, value in rounded(result["at_64_kb"]).items()]
    return "\n".join(lines)


def main() -> None:
    results: list[dict[str, Any]] = []
    at_64_kb: dict[str, Any] = {}
    with page_locked(BYTES) as pool:
        for block_bytes in BLOCK_SIZES:
            bench = Bench(pool, block_bytes)
            for pattern in ("scattered", "runs"):
                results += rates(bench, pattern)
            if block_bytes == 64 << 10:
                for name, copy in implementations().items():
                    at_64_kb[name] = {
                        "both_directions_over_one": both_directions(bench, copy),
                        "compute_slowdown": compute_slowdown(bench, copy),
                        "submission_of_256_blocks_us": submission_us(bench, copy),
                    }
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    result = {
        "gpu": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "bytes_per_copy": BYTES,
        "rates": results,
        "at_64_kb": at_64_kb,
    }
    save("copy_gpu", result)
    print(table(result))


if __name__ == "__main__":
    main()
