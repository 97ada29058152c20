"""A worker that forgets a wait is noticed by the simulation on the fake GPU (tests/gpu/simulation.py).

One test per forgotten wait: tests/gpu/mutations.py is the table. That nothing is noticed without a change, the tests in
tests/gpu show.
"""

from __future__ import annotations

import pytest

from tests.gpu.built import fake_gpu_directory, run
from tests.gpu.mutations import MUTATIONS


def test_there_are_enough_of_them_and_none_twice():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 25


@pytest.mark.smoke
@pytest.mark.process
@pytest.mark.parametrize("name", [mutation.name for mutation in MUTATIONS])
def test_a_forgotten_wait_is_noticed(name):
    done = run("mutants.py", fake_gpu_directory(), name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"noticed  {name}: ")
