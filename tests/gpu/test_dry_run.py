"""`scripts/test-gpu` over the asynchronous fake GPU: the script, its builds and every check of the suite run.

It shows that the suite runs; that it sees what is wrong, `scripts/mutate-native` shows. What it says about CUDA, it
says on a GPU only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

from tests.gpu.built import fake_gpu_directory
from tests.worker.ops.native import ROOT

pytestmark = pytest.mark.process

PARTS = ("fastdeploy_kvcache_v1", "tests/gpu", "custom_ops", "scripts")

COMPILER = """#!/bin/bash
[ "$1" = --list-gpu-arch ] && { echo compute_90; exit; }
echo "$*" >> "%s"
cp "%s" "${@: -1}"
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


def test_everything_passes(tmp_path):
    machine = Machine(tmp_path)
    done = machine.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "paths: kernel, staged, batch, runs\n" in done.stdout
    assert re.findall("left out: (.*)", done.stdout) == [f"flash_checks: Paddle {paddle.__version__} sees no GPU"]
    assert done.stdout.count("\nok  ") == 6 * (4 + 2) + 3 + 16
    assert done.stdout.endswith("all passed\n")
    asked = (machine.directory / "NVCC was asked").read_text()
    assert "code=sm_90" in asked
    assert "code=compute_" not in asked, "PTX needs a driver as new as the toolkit"
