"""GPU copies of cache blocks at the layers and pitches of real models, each path and the automatic choice, against one
pinned cudaMemcpyAsync of the same bytes. Needs CuPy, no Paddle; takes less than 8 minutes.

Then both directions at once, a matrix product beside the copies, and what a swap-in exposes when a pass starts at once.
Times are of CUDA events; contenders take turns, medians count. What does not fit the memory or the time is left out,
and said to be.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np
from _support import median, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Not as `tests.gpu`: a package `tests` of another project may come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/gpu"))
from device import Copy, device_rows, host_rows, land, page_locked, ways
from kernels import kernel

from fastdeploy_kvcache_v1.worker.ops import CopyRuns, LayerRows, plan_runs

POOL_BYTES = 8 << 30
"""Of either tier, less where the GPU has less: holds twice the blocks that are copied."""

LAYERS = 48
ROWS = {
    "16 KB": (16 << 10,) * 2,
    "64 KB": (64 << 10,) * 2,
    "41 + 8.25 KB": (41984, 8448),
    "8 KB": (8 << 10,) * 2,
    "28 KB": (28 << 10,) * 2,
    "32 KB": (32 << 10,) * 2,
    "72 KB": (72 << 10,),
    "128 KB": (128 << 10,) * 2,
}
"""Bytes per role; the ones that matter most come first, should the time run out."""

BLOCKS = (1, 10, 100, 500, 2000)
BESIDE = ("16 KB", "64 KB")
"""What runs beside other work."""

TURNS = 5
SLOW_S = 0.3
"""A contender whose first turn takes longer has one more."""

DEADLINE_S = 400.0
COMPUTE_MS = (1, 5, 20)
MATRIX = 8192
IN, OUT = "H2D", "D2H"

Submit = Callable[[Any], None]
"""Enqueues on a CuPy stream."""


class Case(NamedTuple):
    """Slots of both tiers, and how many of each there are."""

    row: str
    blocks: int
    pattern: str


def seconds_on(stream: Any, submit: Submit) -> tuple[float, float]:
    """Of the GPU, and of the thread that submits."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    began = time.perf_counter()
    submit(stream)
    thread = time.perf_counter() - began
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1000, thread


class Tiers:
    """Both tiers of one model, over memory that all models share."""

    def __init__(self, pool: np.ndarray, flat: Any, widths: Sequence[int]) -> None:
        self.block_bytes = LAYERS * sum(widths)
        self.slots = pool.size // self.block_bytes
        self.pool, self.flat = pool, flat
        self.device: list[LayerRows] = []
        offset = 0
        for _layer in range(LAYERS):
            tensors = []
            for width in widths:
                nbytes = self.slots * width
                tensors.append(flat[offset : offset + nbytes].reshape(self.slots, width))
                offset += nbytes
            self.device.append(device_rows(tensors))
        used = pool[: self.slots * self.block_bytes]
        self.host = host_rows(used, self.slots, [list(widths)] * LAYERS)

    def runs(self, blocks: int, pattern: str) -> CopyRuns:
        """Contiguous, runs of 16, or scattered: on both sides, apart from each other."""
        length = {"contiguous": blocks, "runs": min(16, blocks), "scattered": 1}[pattern]
        rng = np.random.default_rng(blocks)

        def slots() -> list[int]:
            starts = rng.permutation(max(1, self.slots // (length + 1)))[: -(-blocks // length)] * (length + 1)
            return (starts[:, None] + np.arange(length)).reshape(-1)[:blocks].tolist()

        return plan_runs(slots(), slots(), num_sources=self.slots, num_targets=self.slots)

    def copy(self, copy: Copy, runs: CopyRuns, direction: str) -> Submit:
        """In layer by layer, out in one call, as the worker does."""
        if direction == OUT:
            return lambda stream: copy(self.host, self.device, runs, stream.ptr)

        def submit(stream: Any) -> None:
            for targets, sources in zip(self.device, self.host, strict=True):
                copy([targets], [sources], runs, stream.ptr)

        return submit

    def plain(self, nbytes: int, direction: str) -> Submit:
        """One cudaMemcpyAsync."""
        ends = (int(self.flat.data.ptr), self.pool.ctypes.data)
        to, of = ends if direction == IN else ends[::-1]
        return lambda stream: cupy.cuda.runtime.memcpyAsync(to, of, nbytes, 1 if direction == IN else 2, stream.ptr)


def turns(stream: Any, contenders: dict[str, Submit]) -> dict[str, list[tuple[float, float]]]:
    """Each in its turn; the first one of each is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    slow: set[str] = set()
    for turn in range(TURNS + 1):
        for name, submit in contenders.items():
            if name in slow and turn > 1:
                continue
            seconds = seconds_on(stream, submit)
            if turn:
                times[name].append(seconds)
            elif sum(seconds) > SLOW_S:
                slow.add(name)
    return times


def rates(tiers: Tiers, case: Case, copies: dict[str, Copy], stream: Any) -> Iterator[dict[str, Any]]:
    for direction in (IN, OUT):
        runs = tiers.runs(case.blocks, case.pattern)
        nbytes = case.blocks * tiers.block_bytes
        contenders = {"one memcpy": tiers.plain(nbytes, direction)}
        contenders |= {name: tiers.copy(copy, runs, direction) for name, copy in copies.items()}
        times = turns(stream, contenders)
        seconds = {name: median(gpu for gpu, _thread in values) for name, values in times.items()}
        paths = [name for name in copies if name != "auto"]
        yield {
            **case._asdict(),
            "direction": direction,
            "bytes": nbytes,
            "gb_per_s": {name: nbytes / value / 1e9 for name, value in seconds.items()},
            "auto_of_memcpy": seconds["one memcpy"] / seconds["auto"],
            "auto_of_best_path": min(seconds[name] for name in paths) / seconds["auto"],
            "best_path": min(paths, key=seconds.__getitem__),
            "thread_us_per_layer": {
                name: median(thread for _gpu, thread in values) * 1e6 / LAYERS for name, values in times.items()
            },
        }


def cases(fits: Callable[[str], int]) -> Iterator[Case]:
    for row in ROWS:
        for blocks in BLOCKS:
            if 2 * blocks <= fits(row):
                for pattern in ("contiguous", "runs", "scattered") if blocks > 1 else ("scattered",):
                    yield Case(row, blocks, pattern)


def both_directions(tiers: Tiers, copy: Copy, blocks: int, streams: Sequence[Any]) -> float:
    """Throughput of H2D and D2H at once, as a multiple of one after the other. The slots of the two are apart."""
    even = list(range(0, 2 * blocks, 2))
    runs = plan_runs(even, even[::-1], num_sources=tiers.slots, num_targets=tiers.slots)
    odd = CopyRuns.of([run._replace(source=run.source + 1, target=run.target + 1) for run in runs])
    submits = [tiers.copy(copy, runs, IN), tiers.copy(copy, odd, OUT)]
    ratios = []
    for _turn in range(TURNS):
        apart = sum(seconds_on(streams[0], submit)[0] for submit in submits)

        def together(stream: Any) -> None:
            streams[1].wait_event(stream.record())
            submits[0](stream)
            submits[1](streams[1])
            stream.wait_event(streams[1].record())

        ratios.append(apart / seconds_on(streams[0], together)[0])
    return median(ratios)


def product_slowdown(tiers: Tiers, copy: Copy, blocks: int, streams: Sequence[Any]) -> float:
    """Share by which a matrix product takes longer while copies run both ways all the time."""
    compute, into, back = streams
    a, b, out = (cupy.zeros((MATRIX, MATRIX), dtype=cupy.float16) for _ in range(3))
    submits = [tiers.copy(copy, tiers.runs(blocks, "scattered"), direction) for direction in (IN, OUT)]

    def busy(stream: Any) -> None:
        with stream:
            for _repeat in range(10):
                cupy.matmul(a, b, out=out)

    seconds_on(compute, busy)
    copying = seconds_on(into, submits[0])[0]
    slower = []
    for _turn in range(TURNS):
        alone = seconds_on(compute, busy)[0]
        for _repeat in range(1 + int(2 * alone / copying) if copying > 0 else 1):
            submits[0](into)
            submits[1](back)
        slower.append(seconds_on(compute, busy)[0] / alone - 1)
        into.synchronize()
        back.synchronize()
    return median(slower)


def exposed(tiers: Tiers, copy: Copy, blocks: int, streams: Sequence[Any], compute_ms: int) -> float:
    """Milliseconds by which a pass takes longer that waits, before each layer, for that layer's swap-in."""
    compute, into = streams[:2]
    spin = kernel("spin")
    runs = tiers.runs(blocks, "scattered")
    cycles = np.int64(10_000_000)
    per_ms = cycles / (seconds_on(compute, lambda stream: _spin(spin, stream, cycles))[0] * 1000)

    def one_pass(stream: Any, *, loads: bool) -> None:
        arrived = []
        if loads:
            into.wait_event(stream.record())
            for targets, sources in zip(tiers.device, tiers.host, strict=True):
                copy([targets], [sources], runs, into.ptr)
                arrived.append(into.record())
        for layer in range(LAYERS):
            if loads:
                stream.wait_event(arrived[layer])
            _spin(spin, stream, np.int64(per_ms * compute_ms))

    more = []
    for _turn in range(3):
        alone = seconds_on(compute, lambda stream: one_pass(stream, loads=False))[0]
        more.append(seconds_on(compute, lambda stream: one_pass(stream, loads=True))[0] - alone)
    return median(more) * 1000


def _spin(spin: Any, stream: Any, cycles: Any) -> None:
    with stream:
        spin((1,), (1,), (cycles,))


def beside(tiers: Tiers, copies: dict[str, Copy], blocks: int, streams: Sequence[Any]) -> dict[str, Any]:
    return {
        name: {
            "blocks": blocks,
            "both_directions_over_one": both_directions(tiers, copy, blocks, streams),
            "product_slower_by": product_slowdown(tiers, copy, blocks, streams),
        }
        | ({f"exposed_ms_at_{ms}_ms": exposed(tiers, copy, blocks, streams, ms) for ms in COMPUTE_MS if name == "auto"})
        for name, copy in copies.items()
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        "| row | blocks | pattern | way | memcpy GB/s | auto GB/s | auto / memcpy | best path | of best | us/layer |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rates"]:
        rate = row["gb_per_s"]
        lines.append(
            f"| {row['row']} | {row['blocks']} | {row['pattern']} | {row['direction']} | {rate['one memcpy']:.1f} "
            f"| {rate['auto']:.1f} | {row['auto_of_memcpy']:.2f} | {row['best_path']} | {row['auto_of_best_path']:.2f} "
            f"| {row['thread_us_per_layer']['auto']:.1f} |"
        )
    for row, by_path in result["beside"].items():
        for name, numbers in by_path.items():
            lines.append(f"{row}, {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in numbers.items()))
    lines += [f"left out: {each}" for each in result["left_out"]]
    return "\n".join(lines)


def measure(pool: np.ndarray, copies: dict[str, Copy]) -> dict[str, Any]:
    began = time.monotonic()
    flat = cupy.zeros(pool.size, dtype=cupy.uint8)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    tiers = {row: Tiers(pool, flat, widths) for row, widths in ROWS.items()}
    alongside = {
        row: beside(tiers[row], copies, min(100, tiers[row].slots // 4), streams) for row in BESIDE if row in ROWS
    }
    found: list[dict[str, Any]] = []
    left_out = []
    for case in cases(lambda row: tiers[row].slots):
        if time.monotonic() - began > DEADLINE_S:
            left_out.append(f"{case.row}, {case.blocks} blocks, {case.pattern}: no time")
        else:
            found += rates(tiers[case.row], case, copies, streams[0])
    left_out += [
        f"{row}, {blocks} blocks: no memory" for row in ROWS for blocks in BLOCKS if 2 * blocks > tiers[row].slots
    ]
    return {"rates": found, "beside": alongside, "left_out": left_out}


def main() -> None:
    copies, landing = {name: way.all_layers for name, way in ways().items()}, land()
    free, _total = cupy.cuda.runtime.memGetInfo()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    with page_locked(min(POOL_BYTES, int(free) // 4 * 3)) as pool:
        measured = measure(pool, copies)
    result = {
        "gpu": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "layers": LAYERS,
        "live": landing.live,
        "left": landing.left,
        "costs": landing.costs,
        **measured,
    }
    save("copy_gpu", result)
    print(table(result))


if __name__ == "__main__":
    main()
