"""Where the FastDeploy trees are, and how to run a script inside one. Each runs in a process of its own: the two
releases cannot be imported together, and importing one configures logging and warnings for everybody.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import checkout_variable, known_releases

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VARIABLES = {release: checkout_variable(release) for release in known_releases()}
"""Releases with a patch table, and the environment variable that names the checkout of each."""
RELEASES = tuple(VARIABLES)


def tree(release):
    """The checkout of a release, or a skip that says how to get one."""
    directory = os.environ.get(VARIABLES[release])
    if not directory:
        pytest.skip(f"no FastDeploy {release} here: {VARIABLES[release]}=DIR ./scripts/test-fastdeploy")
    return Path(directory).resolve()


RUN_TESTS = """
import os, sys, pytest
code = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)  # FastDeploy leaves threads behind
"""


def run_inside(release, tmp_path, *arguments, manager=True, expect=0, ours=ROOT):
    """Run `python *arguments` with FastDeploy `release` importable, and this package in `ours`; returns its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree(release)), str(ours)]),
        "ENABLE_V1_KVCACHE_MANAGER": "1" if manager else "0",
        "ENABLE_V1_KVCACHE_SCHEDULER": "1",
        "FD_LOG_DIR": str(tmp_path / "log"),
        "PYTHONHASHSEED": "0",
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,  # a minute or two on a quiet machine
        check=False,
    )
    assert done.returncode == expect, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def run_tests_inside(release, tmp_path, name):
    """Run the tests of inside/`name`.py with FastDeploy `release` importable; returns what pytest prints."""
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=", "-o", "consider_namespace_packages=true"]
    options += ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT]  # without namespaces tests/fastdeploy is fastdeploy
    return run_inside(release, tmp_path, "-c", RUN_TESTS, *options, HERE / "inside" / f"{name}.py")
