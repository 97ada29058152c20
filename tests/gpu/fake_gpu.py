"""A process with a fake GPU in it: `python fake_gpu.py DIRECTORY SCRIPT [ARGUMENTS]` runs a script of this folder.

DIRECTORY holds what `build` makes: `libcuda.so.1`, an NVML that knows the driver's release, a copy of the compiled
core, and the copy kernel on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "custom_ops/tests/async_driver"


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


def main() -> None:
    directory, script = Path(sys.argv[1]), sys.argv[2]
    enter(directory)
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(str(HERE / script), run_name="__main__")


if __name__ == "__main__":
    main()
