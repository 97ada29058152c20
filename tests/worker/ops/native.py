"""The build script as a module, its compilers, and Python in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
CUSTOM_OPS = ROOT / "custom_ops"


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_ops_build", CUSTOM_OPS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


def compiler(variable: str = "CXX") -> list[str]:
    """Skips the test where there is none."""
    try:
        return build.compiler(variable)
    except build.BuildError as error:
        pytest.skip(str(error))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
