"""Driver calls, batch descriptors and CPU with which a copy between device and host is submitted, over the fake driver.

Nothing is copied: the driver counts, and so does a stand-in for the kernel's launch. `in` is one layer, as a swap-in
submits it; `out` are all layers of an eviction. What a driver takes for a call is not in it.

`python benchmarks/copy_submission.py [NAME] [TREE]` writes `results/NAME.json`, for the core of another checkout where
TREE is one: `copy_submission_before` is commit 2a3fcbf, which chose by thresholds.
"""

from __future__ import annotations

import ctypes
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _support import ROOT, median, save

LAYERS, DEVICE_SLOTS, HOST_SLOTS = 48, 20_000, 60_000
ROWS = {
    "8 KB": (8 << 10, 8 << 10),
    "16 KB": (16 << 10, 16 << 10),
    "28 KB": (28 << 10, 28 << 10),
    "32 KB": (32 << 10, 32 << 10),
    "64 KB": (64 << 10, 64 << 10),
    "72 KB": (72 << 10, 72 << 10),
    "128 KB": (128 << 10, 128 << 10),
    "41 + 8.25 KB": (41_984, 8448),
}
"""Bytes of each role in one layer of a block."""

BLOCKS = (1, 16, 100, 500, 2000, 4000)
SHAPES = {"contiguous": 4000, "runs of 32": 32, "pairs": 2, "scattered": 1}
"""Neighbours in a run, on both sides; the distances between runs are uneven."""

TURNS = 5
STREAM = 0x1000
AUTO, DEVICE_BASE, HOST_BASE, STAGING = 0, 1 << 40, 1 << 45, 1 << 50

LAUNCH = """
#include "%s/custom_ops/cuda/kernel.h"
#define VISIBLE extern "C" __attribute__((visibility("default")))
int number = 0;
VISIBLE int launches() { return number; }
VISIBLE int kvswap_kernel_abi() { return kvswap::cuda::kKernelAbi; }
VISIBLE int kvswap_kernel_launch(const void*, int, int, void*) { return ++number, 0; }
"""


class Core:
    """The core of `tree`, with the fake driver and a kernel that only counts."""

    def __init__(self, tree: Path, directory: Path) -> None:
        sys.path.insert(0, str(ROOT))
        from tests.worker.ops.fake_cuda import fake_cuda

        self.fake = fake_cuda()
        self.fake.count_only = 1
        self.library = ctypes.CDLL(str(directory / "_core.so"))
        self.kernel = ctypes.CDLL(str(directory / "_core_cuda.so"))
        if hasattr(self.library, "kvswap_cuda_set_staging"):
            staging = ctypes.c_uint64(STAGING), ctypes.c_int64(32 << 20)
            assert self.library.kvswap_cuda_set_staging(*staging) == 0

    def submit(self, rows: tuple[Any, Any, int], runs: list[tuple[int, int, int]], to_device: bool) -> dict[str, Any]:
        """What one submission takes."""
        table = (ctypes.c_int64 * (3 * len(runs)))(*(number for run in runs for number in run))
        plan = ctypes.c_void_p()
        assert self.library.kvswap_plan_runs(table, ctypes.c_int64(len(runs)), ctypes.byref(plan)) == 0
        targets, sources, entries = rows
        stream = ctypes.c_uint64(STREAM)
        before = self.fake.calls + self.kernel.launches(), self.fake.descriptors, self.kernel.launches()
        spent = []
        for _ in range(TURNS):
            start = time.thread_time()
            code = self.library.kvswap_cuda_copy(
                targets, sources, ctypes.c_int64(entries), plan, int(to_device), AUTO, stream
            )
            spent.append(time.thread_time() - start)
            assert code == 0
        after = self.fake.calls + self.kernel.launches(), self.fake.descriptors, self.kernel.launches()
        self.library.kvswap_plan_free(plan)
        calls, descriptors, launches = ((new - old) // TURNS for old, new in zip(before, after, strict=True))
        return {"calls": calls, "descriptors": descriptors, "launches": launches, "us": 1e6 * median(spent)}


def rows_of(widths: tuple[int, ...], layers: int, *, to_device: bool) -> tuple[Any, Any, int]:
    """Descriptors of both sides, and how many: memory that is not there."""
    device, host, block = [], [], sum(widths) * LAYERS
    place, offset = DEVICE_BASE, HOST_BASE
    for _layer in range(layers):
        for width in widths:
            device += [place, DEVICE_SLOTS, width, width]
            host += [offset, HOST_SLOTS, width, block]
            place += DEVICE_SLOTS * width
            offset += width
    sides = [(ctypes.c_int64 * len(numbers))(*numbers) for numbers in (device, host)]
    targets, sources = sides if to_device else reversed(sides)
    return targets, sources, len(widths) * layers


def runs_of(blocks: int, length: int) -> list[tuple[int, int, int]]:
    """Runs in the order of their sources, their targets anywhere."""
    lengths = [length] * (blocks // length) + ([blocks % length] if blocks % length else [])
    order = list(range(len(lengths)))
    random.Random(blocks).shuffle(order)
    runs, source = [], 0
    for each, rank in zip(lengths, order, strict=True):
        runs.append((source, rank * (length + 1) + rank * rank % 3, each))
        source += each + 1 + len(runs) ** 2 % 3
    return runs


def cases(core: Core) -> Iterator[dict[str, Any]]:
    for name, widths in ROWS.items():
        sides = {
            "in": (rows_of(widths, 1, to_device=True), True),
            "out": (rows_of(widths, LAYERS, to_device=False), False),
        }
        for blocks in BLOCKS:
            for shape, length in SHAPES.items():
                if length <= blocks or length == SHAPES["contiguous"]:
                    runs = runs_of(blocks, min(length, blocks))
                    found = {way: core.submit(rows, runs, to_device) for way, (rows, to_device) in sides.items()}
                    yield {"rows": name, "blocks": blocks, "shape": shape, **found}


def build(tree: Path, directory: Path) -> None:
    """The core as it is installed, the fake driver of this checkout."""
    compile_program = runpy.run_path(str(ROOT / "custom_ops/build.py"))
    compiler, flags = compile_program["cxx"](), [*compile_program["CXX_FLAGS"], "-shared"]
    runpy.run_path(str(tree / "custom_ops/build.py"))["build_core"](directory)
    (directory / "launch.cc").write_text(LAUNCH % tree, encoding="utf-8")
    fake = ROOT / "custom_ops/tests/fake_libcuda.cc"
    for source, output in ((fake, "libcuda.so.1"), (directory / "launch.cc", "_core_cuda.so")):
        command = [*compiler, *flags, "-fvisibility=default", str(source), "-o", str(directory / output)]
        subprocess.run(command, check=True)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "copy_submission"
    tree = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ROOT
    if len(sys.argv) > 3:  # with the fake driver
        core = Core(tree, Path(sys.argv[3]))
        save(name, {"layers": LAYERS, "device_slots": DEVICE_SLOTS, "turns": TURNS, "cases": list(cases(core))})
        return
    with tempfile.TemporaryDirectory() as directory:
        build(tree, Path(directory))
        command = [sys.executable, __file__, name, str(tree), directory]
        subprocess.run(command, check=True, env={**os.environ, "LD_LIBRARY_PATH": directory})


if __name__ == "__main__":
    main()
