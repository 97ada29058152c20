"""The GPU benchmark's own code, tried without a GPU: a NumPy stand-in for CuPy, the fake driver, no kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.ops.native import CUSTOM_OPS, ROOT, compile_program, require_core

pytestmark = pytest.mark.process

BENCHMARK = """
import sys
sys.path.insert(0, "benchmarks")
import copy_gpu
copy_gpu.POOL_BYTES, copy_gpu.LAYERS, copy_gpu.TURNS, copy_gpu.MATRIX = 40 << 20, 3, 1, 64
copy_gpu.BLOCKS = (1, 10, 2000)
copy_gpu.save = lambda name, result: print(name, result["gpu"], len(result["rates"]), ",".join(result["live"]))
copy_gpu.main()
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with CuPy and a driver, but without the copy kernel."""
    require_core()
    unwanted = shutil.ignore_patterns("_core_cuda.so", "_paddle_ops.so", "__pycache__")
    shutil.copytree(ROOT / "fastdeploy_kvcache_v1", tmp_path / "fastdeploy_kvcache_v1", ignore=unwanted)
    shutil.copytree(ROOT / "tests/gpu", tmp_path / "tests/gpu")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copy(ROOT / "tests/worker/ops/cupy_stand_in.py", tmp_path / "cupy.py")
    compile_program([CUSTOM_OPS / "tests/fake_libcuda.cc"], tmp_path / "libcuda.so.1", "-fPIC", "-shared")
    compile_program([CUSTOM_OPS / "tests/fake_nvml.cc"], tmp_path / "libnvidia-ml.so.1", "-fPIC", "-shared")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}


def test_the_benchmark_runs_on_the_fake(machine):
    """Its numbers mean nothing here."""
    done = subprocess.run(
        [sys.executable, "-c", BENCHMARK],
        env=machine,
        cwd=machine["PYTHONPATH"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert done.stdout.startswith(f"copy_gpu none {len(rows)} batch,runs\n")
    assert len(rows) == 8 * 4 * 2
    assert {row[3] for row in rows} == {"H2D", "D2H"}
    assert {row[2] for row in rows} == {"contiguous", "runs", "scattered"}
    assert "64 KB, auto: blocks 26, both_directions_over_one" in done.stdout
    assert "exposed_ms_at_20_ms" in done.stdout
    assert done.stdout.count("left out: ") == 8
