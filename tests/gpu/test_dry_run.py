"""`scripts/test-gpu` over the asynchronous fake GPU: the script, its builds and every check of the suite run.

It shows that the suite runs and sees what is wrong. What it says about CUDA, it says on a GPU only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.built import fake_gpu_directory
from tests.worker.ops.native import ROOT, compile_program

pytestmark = pytest.mark.process

PARTS = ("fastdeploy_kvcache_v1", "tests/gpu", "custom_ops", "scripts")

COMPILER = """#!/bin/bash
[ "$1" = --list-gpu-arch ] && { echo compute_90; exit; }
echo "$*" >> "%s"
cp "%s" "${@: -1}"
"""

NO_KERNEL = """
#include "%s/custom_ops/cuda/kernel.h"
extern "C" int kvswap_kernel_abi() { return kvswap::cuda::kKernelAbi; }
extern "C" int kvswap_kernel_launch() { return 222; }  // built by a toolkit that is newer than the driver
"""


class Machine:
    """A checkout on a machine with a GPU, CuPy, compilers, and another project's package `tests` first on the path."""

    def __init__(self, directory: Path) -> None:
        self.fake = fake_gpu_directory()
        self.project, self.directory = directory / "project", directory
        unwanted = shutil.ignore_patterns("*.so", "__pycache__")
        for part in PARTS:
            shutil.copytree(ROOT / part, self.project / part, ignore=unwanted)
        (directory / "elsewhere/tests").mkdir(parents=True)
        (directory / "elsewhere/tests/__init__.py").write_text("raise ImportError('the tests of another project')\n")
        self.compiler("CXX", self.fake / "_core.so")
        self.compiler("NVCC", self.fake / "_core_cuda.so")

    def compiler(self, name: str, result: Path) -> None:
        """What the compiler of this name makes of any source."""
        program = self.directory / name
        program.write_text(COMPILER % (self.directory / f"{name} was asked", result))
        program.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        stand_in = self.project / "tests/gpu/stand_in"
        environment = {
            **os.environ,
            **{name: str(self.directory / name) for name in ("CXX", "NVCC")},
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{self.directory / 'elsewhere'}:{stand_in}",
            "LD_LIBRARY_PATH": str(self.fake),
        }
        command = [str(self.project / "scripts/test-gpu"), "--suite"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_everything_passes(machine):
    done = machine.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "paths: kernel, staged, batch, runs\n" in done.stdout
    assert "left out" not in done.stdout
    assert done.stdout.count("\nok  ") == 6 * 5 + 5 + 16
    assert done.stdout.endswith("all passed\n")
    asked = (machine.directory / "NVCC was asked").read_text()
    assert "code=sm_90" in asked
    assert "code=compute_" not in asked, "PTX needs a driver as new as the toolkit"


def test_a_kernel_that_the_driver_refuses_is_left_out_and_said_to_be(machine, tmp_path):
    """The suite's checks themselves are cut, to show that a wrong copy fails."""
    (tmp_path / "kernel.cc").write_text(NO_KERNEL % ROOT)
    machine.compiler("NVCC", compile_program([tmp_path / "kernel.cc"], tmp_path / "no.so", "-fPIC", "-shared"))
    suite = machine.project / "tests/gpu/suite.py"
    suite.write_text(suite.read_text().replace("    failed = 0\n", LESS + "    failed = 0\n"))
    done = machine.run()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "paths: batch, runs\n" in done.stdout
    for name in ("kernel", "staged"):
        assert f"left out: {name}: ConfigError: this GPU cannot run the copy kernel (CUDA error 222)" in done.stdout
    assert done.stdout.count("\nok  ") == 3
    assert "\nFAILED  batch    random_copies\n" in done.stdout
    assert done.stdout.endswith("1 failed\n")


LESS = """    global optional, ways
    copy_checks.CHECKS, optional = (copy_checks.random_copies,), lambda name: None
    whole = ways()
    batch = whole["batch"]._replace(all_layers=lambda to, of, runs, stream: whole["runs"][0](to, of, runs[1:], stream))
    ways = lambda: {**whole, "batch": batch}
"""
