"""The GPU suite's own code, tried without a GPU: a NumPy stand-in for CuPy, the fake driver, no kernel.

It shows that the suite runs and that it sees a copy that is wrong. What it says about CUDA, it says on a GPU only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.worker import ops
from tests.worker.ops.native import CUSTOM_OPS, ROOT, compile_program

CUPY = '''
"""Copies happen at once, so nothing can be said about order."""
import ctypes, types
import numpy as np

class Array:
    def __init__(self, array):
        self.array, self.shape, self.size = array, array.shape, array.size
        self.data = types.SimpleNamespace(ptr=array.ctypes.data)
    def reshape(self, *shape): return Array(self.array.reshape(*shape))
    def __getitem__(self, index): return Array(self.array[index])

uint8, float32 = np.uint8, np.float32
zeros = lambda shape, dtype: Array(np.zeros(shape, dtype))
zeros_like = lambda array: Array(np.zeros_like(array.array))
asarray = lambda array: Array(array.copy())
asnumpy = lambda array: array.array.copy()

class Event:
    done = True
    def synchronize(self): pass
    def record(self, stream): self.stream = stream

class Stream:
    def __init__(self, non_blocking):
        self.ptr = 0x7700
    def synchronize(self): pass
    def record(self): return Event()
    def wait_event(self, event): assert isinstance(event, Event)
    def __enter__(self): return self
    def __exit__(self, *_): pass

class RawKernel:
    def __init__(self, code, name): assert f"void {name}(" in code
    def __call__(self, grid, block, arguments): assert len(grid) == len(block) == 1

class Device:
    def synchronize(self): pass

def copy_2d(to, to_pitch, of, of_pitch, width, height, kind, stream):
    for row in range(height):
        ctypes.memmove(to + row * to_pitch, of + row * of_pitch, width)

cuda = types.ModuleType("cupy.cuda")
cuda.Event, cuda.Stream, cuda.Device = Event, Stream, Device
cuda.get_elapsed_time = lambda start, end: 2.0
cuda.runtime = types.SimpleNamespace(
    getDeviceProperties=lambda device: {"name": b"none"}, driverGetVersion=lambda: 0,
    memcpyHostToDevice=1, memcpyDeviceToHost=2, hostRegister=lambda *_: None, hostUnregister=lambda *_: None,
    memcpyAsync=lambda to, of, nbytes, kind, stream: ctypes.memmove(to, of, nbytes), memcpy2DAsync=copy_2d,
)
import sys
sys.modules["cupy.cuda"] = cuda
'''

PROGRAM = """
from tests.gpu import suite
suite.CHECKS.remove(suite.order_is_kept)
raise SystemExit(suite.main())
"""

BROKEN = """
from tests.gpu import suite
suite.CHECKS.remove(suite.order_is_kept)
right = suite.implementations
suite.implementations = lambda: {"broken": lambda to, of, runs, stream: right()["auto"](to, of, runs[1:], stream)}
raise SystemExit(suite.main())
"""


BENCHMARK = """
import sys
sys.path.insert(0, "benchmarks")
import copy_gpu
copy_gpu.BYTES, copy_gpu.BLOCK_SIZES, copy_gpu.TURNS = 1 << 20, (4096, 65536), 1
copy_gpu.save = lambda name, result: print(name, result["gpu"], len(result["rates"]))
copy_gpu.main()
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with CuPy and a driver, but without the copy kernel."""
    if ops.COMPILED is None:
        pytest.skip("there is no compiled core")
    unwanted = shutil.ignore_patterns("_core_cuda.so", "_paddle_ops.so", "__pycache__")
    shutil.copytree(ROOT / "fastdeploy_kvcache_v1", tmp_path / "fastdeploy_kvcache_v1", ignore=unwanted)
    shutil.copytree(ROOT / "tests/gpu", tmp_path / "tests/gpu")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    (tmp_path / "cupy.py").write_text(CUPY)
    compile_program([CUSTOM_OPS / "tests/fake_libcuda.cc"], tmp_path / "libcuda.so.1", "-fPIC", "-shared")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}


def run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=environment["PYTHONPATH"],
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_suite_passes_on_the_fake(machine):
    done = run(PROGRAM, machine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "paths: cupy, auto, runs, batch; missing: ['kernel']" in done.stdout
    assert done.stdout.count("ok  ") == 12
    assert done.stdout.endswith("all passed\n")


def test_the_suite_sees_a_copy_that_leaves_something_out(machine):
    done = run(BROKEN, machine)
    assert done.returncode == 1
    assert "FAILED  broken   random_copies" in done.stdout


def test_the_benchmark_runs_on_the_fake(machine):
    """Its numbers mean nothing here."""
    done = run(BENCHMARK, machine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("copy_gpu none 8\n")
    assert "| 64 KB | runs | D2H |" in done.stdout
    assert "batch: {'both_directions_over_one'" in done.stdout
