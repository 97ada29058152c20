"""The build script as a module, and the test programs it makes."""

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


def compiler() -> list[str]:
    try:
        return build.cxx()
    except build.BuildError as error:
        pytest.skip(str(error))


def c_compiler() -> list[str]:
    try:
        return build.cc()
    except build.BuildError as error:
        pytest.skip(str(error))


def cuda_compiler() -> str:
    try:
        return build.nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))


def compile_program(sources: list[Path], output: Path, *flags: str) -> Path:
    common = ["-std=c++17", "-g", "-O1", "-fno-omit-frame-pointer", "-pthread", "-Wall", "-Wextra", "-Werror"]
    command = [*compiler(), *common, *flags, *map(str, sources), "-ldl", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return output


def run_program(program: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [str(program), *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, f"{program.name} {arguments}: {done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
