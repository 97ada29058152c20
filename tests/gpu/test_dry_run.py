"""The suite of `scripts/test-gpu` over the fake GPU: every check runs. Of CUDA it says nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import paddle
import pytest

from tests.gpu.in_process import STAND_IN

pytestmark = pytest.mark.process


def test_everything_passes():
    places = [STAND_IN, STAND_IN.parents[2]]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, places))}
    command = [sys.executable, str(STAND_IN.parent / "suite.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"left out: flash_checks: Paddle {paddle.__version__} sees no GPU" in done.stdout
    assert done.stdout.count("\nok  ") + done.stdout.startswith("ok  ") == 3 * (4 + 3) + 2 + 16
    assert done.stdout.endswith("all passed\n")
