"""A process with a fake GPU in it: `python fake_gpu.py DIRECTORY SCRIPT [ARGUMENTS]` runs a script of this folder,
and `python fake_gpu.py DIRECTORY simulate FIRST COUNT STEPS` the simulation with so many seeds.

DIRECTORY holds what `build` makes: `libcuda.so.1`, an NVML that knows the driver's release, a copy of the compiled
core, and the copy kernel on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "custom_ops/tests/async_driver"

PATHS = ("cupy", "auto", "runs", "batch", "kernel")


def build(directory: Path, compile_program: Any, core: Path) -> None:
    """`compile_program(sources, output, *flags)` compiles C++."""
    driver = [path for path in sorted(SOURCES.glob("*.cc")) if path.name != "kernel.cc"]
    compile_program(driver, directory / "libcuda.so.1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1")
    compile_program([SOURCES.parent / "fake_nvml.cc"], directory / "libnvidia-ml.so.1", "-fPIC", "-shared")
    compile_program([SOURCES / "kernel.cc"], directory / "_core_cuda.so", "-fPIC", "-shared")
    shutil.copy(core, directory / "_core.so")


def enter(directory: Path) -> None:
    """From now on this process has a fake driver, and `cupy` is the stand-in; so have the Python processes that it
    starts. Before the package is imported.
    """
    # Found by its name from now on, by whatever asks the loader for a driver.
    ctypes.CDLL(str(directory / "libcuda.so.1"))
    places = [str(HERE), str(HERE / "stand_in"), str(ROOT)]
    sys.path[:0] = places
    os.environ |= {"LD_LIBRARY_PATH": str(directory), "PYTHONPATH": ":".join(places)}


def use_path(directory: Path, name: str) -> None:
    """Copies go by `name`, one of `PATHS`."""
    from fastdeploy_kvcache_v1.worker import ops
    from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps
    from fastdeploy_kvcache_v1.worker.ops.compiled import Path as CopyPath
    from fastdeploy_kvcache_v1.worker.ops.library import Library

    ops._landed = ops.Landing((name,))  # nothing is tried or measured: the choice is ours
    core = CompiledOps(Library(directory / "_core.so"))
    for op in ("swap_cache_per_layer", "swap_cache_all_layers"):
        if name == "cupy":
            ops.install(op, "cuda", ops.TWINS[op, "cuda"])
            continue
        run, path = getattr(core, op), CopyPath[name.upper()]
        ops.install(
            op,
            "cuda",
            ops.Implementation(name, lambda *given, run=run, path=path: run(*given, path)),
        )


def simulate(directory: Path, seed: int, steps: int) -> Any:
    """What a run of this seed has seen. Raises `Fault`, also for what the driver holds against the code."""
    from cupy import driver
    from simulation import Fault, Simulation

    chosen = random.Random(seed)
    gc.collect()
    driver.reset(seed, queue_depth=chosen.choice([4, 32, 500]), has_aliases=chosen.random() < 0.5)
    use_path(directory, PATHS[seed % len(PATHS)])
    simulation = Simulation(seed)
    seen = simulation.run(steps, lambda: driver.library.fake_pump(chosen.randrange(30)))
    simulation.worker.close()
    if driver.faults():
        raise Fault(f"the driver: {driver.faults()[0]}")
    return seen


def simulate_many(directory: Path, first: int, count: int, steps: int) -> None:
    from simulation import Seen

    total = Seen()
    for seed in range(first, first + count):
        print(f"seed {seed}, copies by {PATHS[seed % len(PATHS)]}", end=": ", flush=True)
        seen = simulate(directory, seed, steps)
        print(seen, flush=True)
        total += seen
    print(f"all: {total}")


def main() -> None:
    directory, script = Path(sys.argv[1]), sys.argv[2]
    enter(directory)
    if script == "simulate":
        logging.disable()  # copies that are made to fail say so, with a traceback each
        simulate_many(directory, *map(int, sys.argv[3:]))
        return
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(str(HERE / script), run_name="__main__")


if __name__ == "__main__":
    main()
