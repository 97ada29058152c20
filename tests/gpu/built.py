"""The fake GPU for pytest: built once, entered by processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.gpu import fake_gpu
from tests.worker.ops.native import compile_program, require_core

_directory = tempfile.TemporaryDirectory(prefix="fake-gpu-")


@cache
def fake_gpu_directory() -> Path:
    """What `fake_gpu.py` takes. Skips where there is no compiler or no compiled core."""
    directory = Path(_directory.name)
    fake_gpu.build(directory, compile_program, require_core().library.path)
    return directory


def run(*arguments: object, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """`fake_gpu.py` with these arguments behind its directory."""
    command = [sys.executable, fake_gpu.__file__, fake_gpu_directory(), *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, cwd=fake_gpu.ROOT)
