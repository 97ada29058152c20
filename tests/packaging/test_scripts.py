"""The set-up behind every script: clear errors, and nothing done twice."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
OF_VERSION = '[ "$1" = -V ] && echo Python'


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


@pytest.mark.parametrize(
    # What the interpreter does, the script that needs another one, and the one line that it says.
    ("python", "script", "line"),
    [
        (f"{OF_VERSION} 3.8.19 || exit 1", "check", r"Python 3.10 to 3.13 is needed, .* 3\.8\.19: .*"),
        (f"{OF_VERSION} 3.13.0 || exit 1", "test-fastdeploy", "Python 3.10 to 3.12 is needed for FastDeploy, .*"),
        (None, "check", "Python 3.10 to 3.13 is needed, .*/python3 is missing: .*"),
        (
            f'[ "$2" != venv ] || exit 1\nexec {sys.executable} "$@"',
            "check",
            ".* cannot create a virtual environment .*",
        ),
    ],
)
def test_an_interpreter_that_cannot_be_used_is_one_clear_line(tmp_path, environ, python, script, line):
    if python is not None:
        executable(tmp_path / "python3", f"#!/bin/sh\n{python}\n")
    executable(tmp_path / "fastdeploy/envs.py", "")
    environ |= {"PYTHON": str(tmp_path / "python3"), "FASTDEPLOY_25": str(tmp_path)}
    environ["FASTDEPLOY_KVCACHE_HOST_VENV"] = str(tmp_path / "venv")
    done = run([str(ROOT / "scripts" / script)], environ)
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("Creating ")]
    assert re.fullmatch(f"error: {line}", said), said


def test_the_path_of_an_interpreter_may_have_a_space(tmp_path, environ):
    python = executable(tmp_path / "my python/python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    done = run(["bash", "-c", f"cd {ROOT}; . scripts/env.sh; find_python"], {**environ, "PYTHON": str(python)})
    assert done.stdout == f"{python}\n"


class System:
    """A FAKE system that lacks venv and libgomp; `scripts/test-bare` sees them installed."""

    def __init__(self, directory: Path, user: int) -> None:
        self._calls = directory / "calls"
        bin = directory / "bin"
        executable(
            bin / "python3",
            f'#!/bin/sh\ncase "$2" in *ensurepip*|*libgomp*) exit 1; esac\nexec {sys.executable} "$@"\n',
        )
        executable(bin / "apt-get", f'#!/bin/sh\necho "$@" >>{self._calls}\n')
        executable(bin / "id", f"#!/bin/sh\necho {user}\n")
        self.environ = {**os.environ, "PYTHON": "python3", "FASTDEPLOY_KVCACHE_VENV": str(directory / "venv")}
        self.environ["PATH"] = f"{bin}:{os.environ['PATH']}"

    def create_env(self, **environ: str) -> subprocess.CompletedProcess:
        """Up to the moment when it would ask the network."""
        return run(
            ["bash", "-c", f"cd {ROOT}; . scripts/env.sh; create_env"], {**self.environ, "PIP_NO_INDEX": "1", **environ}
        )

    def installs(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.mark.parametrize(
    ("user", "environ", "command"),
    [
        (1000, {}, "sudo apt-get install -y"),
        (0, {"FASTDEPLOY_KVCACHE_NO_APT": "1"}, "apt-get update && apt-get install -y"),
    ],
)
def test_user_without_rights_sees_the_command_that_installs(tmp_path, user, environ, command):
    system, packages = System(tmp_path, user), "python3-venv libgomp1"
    done = system.create_env(**environ)
    assert done.stderr == f"error: this system lacks {packages}: {command} {packages}\n"
    assert done.returncode != 0
    assert (system.installs(), (tmp_path / "venv").exists()) == ([], False)


def without_a_fitting_python(tmp_path: Path, *, uv_brings_one: bool) -> list[str]:
    """What is said where Python is 3.14. FAKE: this Python, and the uv that it gets."""
    uv = executable(
        tmp_path / "uv",
        '#!/bin/sh\n[ "$2" = pip ] && exit\n'
        f'[ "$2 $3 $4 $5" = "uv python install 3.13" ] && exit {int(not uv_brings_one)}\n'
        f'[ "$2 $3 $4" = "uv python find" ] && echo {sys.executable}\n',
    )
    executable(
        tmp_path / "bin/python3",
        f'#!/bin/sh\n[ "$1" = -V ] && echo Python 3.14.1\n'
        f'[ "$2" = venv ] && mkdir -p "$4/bin" && cp {uv} "$4/bin/python"\nexit 0\n',
    )
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    environ["FASTDEPLOY_KVCACHE_VENV"] = str(tmp_path / "venv")
    environ.pop("PYTHON", None)
    script = f"cd {ROOT}; . scripts/env.sh; find_python() {{ :; }}; create_env"
    done = run(["bash", "-c", script], environ)
    assert done.returncode != 0, "nothing can be installed without an index"
    return done.stderr.splitlines()


def test_where_no_python_fits_uv_brings_one(tmp_path):
    asked, created, *_ = without_a_fitting_python(tmp_path, uv_brings_one=True)
    assert asked == "This system has no Python 3.10 to 3.13: uv is asked for one"
    assert created.startswith(f"Creating {tmp_path / 'venv'} with Python 3.1")
    assert (tmp_path / "venv/bin/python").exists()


def test_without_python_from_uv_one_line_names_the_needed_versions(tmp_path):
    assert without_a_fitting_python(tmp_path, uv_brings_one=False) == [
        "This system has no Python 3.10 to 3.13: uv is asked for one",
        "error: Python 3.10 to 3.13 is needed, python3 is Python 3.14.1: install one, or set PYTHON=/path/to/python3",
    ]


def test_current_environment_is_left_alone(tmp_path, environ):
    calls = tmp_path / "calls"
    executable(tmp_path / "venv/bin/python", f'#!/bin/sh\necho "$@" >>{calls}\nexec {sys.executable} "$@"\n')
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
    installs = [call for call in calls.read_text().splitlines() if " install " in call or " sync " in call]
    assert installs == [
        f"-m pip install -qq --require-hashes -r {ROOT}/locks/uv.txt",
        f"-m uv --quiet pip sync --require-hashes {ROOT}/locks/dev.txt",
        f"-m uv --quiet pip install --no-deps --no-build-isolation -e {ROOT}",
    ]


def test_a_failed_installation_is_tried_again(tmp_path, environ):
    executable(tmp_path / "venv/bin/python", '#!/bin/sh\n[ "$2" != uv ] || { echo "no network" >&2; exit 1; }\n')
    done = run(["bash", "-c", f"cd {ROOT}; . scripts/env.sh; setup_env"], environ)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-2:] == [
        "no network",
        "error: the dependencies in locks/dev.txt were not installed; uv's message is above",
    ]
    assert not (tmp_path / "venv/.fastdeploy-kvcache-stamp").exists()


@pytest.mark.parametrize("source", ["pyproject.toml", "locks/dev.txt", "locks/uv.txt", "custom_ops/copy_rows.c"])
def test_change_of_a_source_of_the_environment_is_noticed(tmp_path, environ, source):
    copy = tmp_path / "checkout"
    for part in ("scripts", "custom_ops", "locks"):
        shutil.copytree(ROOT / part, copy / part)
    for part in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / part, copy / part)

    def fingerprint() -> str:
        return run(["bash", "-c", f"cd {copy}; . scripts/env.sh; fingerprint"], environ).stdout

    before = fingerprint()
    assert before == fingerprint()
    with (copy / source).open("a") as file:
        file.write("changed\n")
    assert fingerprint() != before
