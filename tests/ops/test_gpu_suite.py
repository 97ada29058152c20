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

from fastdeploy_kvcache_v1 import ops
from tests.ops.native import CUSTOM_OPS, ROOT, compile_program

CUPY = '''
"""Copies happen at once, so nothing can be said about order."""
import ctypes, types
import numpy as np

class Array:
    def __init__(self, array):
        self.array, self.shape, self.size = array, array.shape, array.size
        self.data = types.SimpleNamespace(ptr=array.ctypes.data)

asarray = lambda array: Array(array.copy())
asnumpy = lambda array: array.array.copy()

class Event:
    done = True
    def synchronize(self): pass

class Stream:
    def __init__(self, non_blocking):
        self.ptr = 0x7700
    def synchronize(self): pass

class Device:
    def synchronize(self): pass

def copy_2d(to, to_pitch, of, of_pitch, width, height, kind, stream):
    for row in range(height):
        ctypes.memmove(to + row * to_pitch, of + row * of_pitch, width)

cuda = types.ModuleType("cupy.cuda")
cuda.Event, cuda.Stream, cuda.Device = Event, Stream, Device
cuda.runtime = types.SimpleNamespace(
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


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with CuPy and a driver, but without the copy kernel."""
    if ops.COMPILED is None:
        pytest.skip("there is no compiled core")
    unwanted = shutil.ignore_patterns("_core_cuda.so", "_paddle_ops.so", "__pycache__")
    shutil.copytree(ROOT / "fastdeploy_kvcache_v1", tmp_path / "fastdeploy_kvcache_v1", ignore=unwanted)
    shutil.copytree(ROOT / "tests/gpu", tmp_path / "tests/gpu")
    (tmp_path / "cupy.py").write_text(CUPY)
    compile_program([CUSTOM_OPS / "tests/fake_libcuda.cc"], tmp_path / "libcuda.so.1", "-fPIC", "-shared")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}


def run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-P", "-c", program] if sys.version_info >= (3, 11) else [sys.executable, "-c", program],
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
