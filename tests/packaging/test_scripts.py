"""The set-up behind every script: clear errors, and nothing done twice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environ(tmp_path):
    return {**os.environ, "FASTDEPLOY_KVCACHE_VENV": str(tmp_path / "venv")}


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


def test_too_old_python_is_one_clear_line(tmp_path, environ):
    old = executable(tmp_path / "python3", '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.8.19 || exit 1\n')
    done = run([str(ROOT / "scripts/check")], {**environ, "PYTHON": str(old)})
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: Python 3.10, 3.11 or 3.12 is needed")
    assert "3.8.19" in done.stderr


def test_missing_venv_module_is_one_clear_line(tmp_path, environ):
    bare = executable(
        tmp_path / "python3",
        f'#!/bin/sh\n[ "$2" = venv ] && echo "No module named venv" >&2 && exit 1\nexec {sys.executable} "$@"\n',
    )
    done = run([str(ROOT / "scripts/check")], {**environ, "PYTHON": str(bare)})
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if not line.startswith("Creating ")]
    assert len(errors) == 1
    assert "cannot create a virtual environment" in errors[0]


def test_current_environment_is_left_alone(tmp_path, environ):
    calls = tmp_path / "calls"
    executable(
        tmp_path / "venv/bin/python",
        f'#!/bin/sh\necho "$@" >>{calls}\nexec {sys.executable} "$@"\n',
    )
    script = '. scripts/env.sh; fingerprint >"$VENV/.fastdeploy-kvcache-stamp"; setup_env; command -v python'
    done = run(["bash", "-c", f"cd {ROOT}; {script}"], environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "venv/bin/python")
    assert "pip" not in calls.read_text()


def test_changed_requirements_are_installed_again(tmp_path, environ):
    calls = tmp_path / "calls"
    executable(tmp_path / "venv/bin/python", f'#!/bin/sh\necho "$@" >>{calls}\n')
    script = '. scripts/env.sh; echo other >"$VENV/.fastdeploy-kvcache-stamp"; setup_env; setup_env'
    done = run(["bash", "-c", f"cd {ROOT}; {script}"], environ)
    assert done.returncode == 0, done.stderr
    assert calls.read_text().count("pip install") == 1


def test_ci_runs_what_a_developer_runs():
    assert (ROOT / ".ci/run").read_text().splitlines()[1:] == ['exec "$(dirname "$0")/../scripts/test" "$@"']


def test_changed_native_sources_are_built_again(tmp_path, environ):
    copy = tmp_path / "checkout"
    for part in ("scripts", "custom_ops"):
        shutil.copytree(ROOT / part, copy / part)
    for part in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / part, copy / part)

    def fingerprint() -> str:
        return run(["bash", "-c", f"cd {copy}; . scripts/env.sh; fingerprint"], environ).stdout

    before = fingerprint()
    assert before == fingerprint()
    with (copy / "custom_ops/core/copy.cc").open("a") as source:
        source.write("// changed\n")
    assert fingerprint() != before
