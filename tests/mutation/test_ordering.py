"""A worker that forgets a wait is noticed: by the world's ranks, or by the tests that forgotten_waits.txt names.
So is a launcher of copies that makes a mistake (launcher_mistakes.txt), and what no seed of the world meets
(tests/world/mutants.txt).

One process for each. That nothing is noticed without a change, tests/world and the named tests show.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.changes import read
from tests.mutation.driver import PACKAGE, ROOT
from tests.mutation.hunt import MUTANTS

LIST = Path(__file__).with_name("forgotten_waits.txt")
FORGOTTEN = read(LIST)
NAMING_TESTS = [
    *read(LIST.with_name("launcher_mistakes.txt")),
    *(mutant for mutant in MUTANTS if mutant.tests),
]
SEEDS = 50


def run(*command, **environ):
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True)


def test_there_are_enough_of_them_and_none_twice():
    assert len({change.name for change in FORGOTTEN}) == len(FORGOTTEN) >= 54


@pytest.mark.smoke
@pytest.mark.process
@pytest.mark.parametrize("change", FORGOTTEN, ids=lambda change: change.name)
def test_a_forgotten_wait_is_noticed(tmp_path, change):
    module, changed = PACKAGE / change.file, tmp_path / "changed.py"
    changed.write_text(change.applied_to(module.read_text()))
    if not change.tests:
        done = run("tests.mutation.hunt", "--here", f"--of={LIST}", f"--seeds={SEEDS}", "--", change.name)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return
    require_failure(change.tests, module, changed)


@pytest.mark.process
@pytest.mark.parametrize("change", NAMING_TESTS, ids=lambda change: change.name)
def test_a_mistake_is_noticed_by_the_tests_that_it_names(tmp_path, change):
    module, changed = PACKAGE / change.file, tmp_path / "changed.py"
    changed.write_text(change.applied_to(module.read_text()))
    require_failure(change.tests, module, changed)


def require_failure(tests, module, changed):
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "tests.mutation.early")
    done = run("pytest", *options, tests, MUTANT=f"{module}:{changed}")
    assert (done.returncode, " failed" in done.stdout) == (1, True), done.stdout + done.stderr
