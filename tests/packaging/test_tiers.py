"""The two tiers: what `scripts/test` runs, what CI runs, and that the mark between them is kept."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CONFTEST = """
import pytest
from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_deselected, pytest_generate_tests
from tests.conftest import pytest_terminal_summary
from tests.processes import Guard

def pytest_configure(config):
    config.addinivalue_line("markers", "process: ")
    config.addinivalue_line("markers", "smoke: ")
    config.pluginmanager.register(Guard())
"""

STARTS = {
    "subprocess": "subprocess.run(['true'])",
    "fork": "os.fork() or os._exit(0)",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "system": "os.system('true')",
    "multiprocessing, fork": "multiprocessing.get_context('fork').Process(target=int).start()",
    "multiprocessing, spawn": "multiprocessing.get_context('spawn').Process(target=int).start()",
    "a thread": "ThreadPoolExecutor().submit(os.system, 'true').exception()",
    "production code that goes on": "contextlib.suppress(Exception).__enter__(); ignored(subprocess.run, ['true'])",
}
"""Ways to start a process, one test each."""

MODULE = """
import contextlib, multiprocessing, os, subprocess
from concurrent.futures import ThreadPoolExecutor
import pytest

def ignored(use, *arguments):
    with contextlib.suppress(Exception):
        use(*arguments)
"""


PLAIN = "def test_plain():\n    pass\n"
STARTED = "def test_started():\n    subprocess.run(['true'])\n"
MARK = "@pytest.mark.process\n"


def run(directory: Path, module: str, *flags: str) -> str:
    """What pytest says of a module of tests."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_some.py").write_text(MODULE + module)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", directory, *flags, "test_some.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/bin:/usr/bin"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.smoke
@pytest.mark.process
def test_no_process_starts_outside_the_mark(tmp_path):
    tests = [f"def test_{number}():\n    {start}\n" for number, start in enumerate(STARTS.values())]
    fixture = "@pytest.fixture\ndef child():\n    subprocess.run(['true'])\n\ndef test_fixture(child):\n    pass\n"
    said = run(tmp_path, "\n".join([*tests, fixture]))
    for number, way in enumerate(STARTS):
        assert f"test_some.py::test_{number} - " in said, (way, said)
    assert "ERROR test_some.py::test_fixture - RuntimeError: mark this test `process`" in said


@pytest.mark.process
def test_last_lines_count_the_tests_left_out_and_how_to_run_them(tmp_path):
    said = run(tmp_path, PLAIN + MARK + STARTED, "-m", "not process or smoke")
    assert 'left out 1, not in "not process or smoke": ./scripts/test --all runs every test\n' in said


RANDOM = """
@pytest.mark.parametrize("seed", range(2))
def test_life(seed):
    assert seed < 2
"""


@pytest.mark.process
def test_night_changes_seeds_of_random_tests_alone_and_prints_the_replay(tmp_path):
    assert "3 passed" in run(tmp_path, PLAIN + RANDOM)
    said = run(tmp_path, PLAIN + RANDOM, "--new-seeds", "7")
    assert "2 failed" in said
    assert "passed" not in said
    assert "replay: ./scripts/night 7 'test_some.py::test_life[7001]'\n" in said


def test_ci_runs_every_test():
    assert "scripts/test --all" in (ROOT / ".ci/run").read_text().splitlines()
