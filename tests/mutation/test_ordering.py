"""A worker that forgets a wait is noticed by the simulation on the fake GPU (tests/gpu/simulation.py).

One test per forgotten wait of tests/gpu/forgotten_waits.txt. That nothing is noticed without a change, the tests in
tests/gpu show.
"""

from __future__ import annotations

import pytest

from tests.gpu import fake_gpu
from tests.gpu.built import fake_gpu_directory, run
from tests.gpu.changes import read

FORGOTTEN = [change.name for change in read(fake_gpu.HERE / "forgotten_waits.txt")]


def test_there_are_enough_of_them_and_none_twice():
    assert len(set(FORGOTTEN)) == len(FORGOTTEN) >= 54


@pytest.mark.smoke
@pytest.mark.process
@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_wait_is_noticed(name):
    done = run("mutants.py", fake_gpu_directory(), name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"noticed  {name}: ")
