"""The driver, over a folder whose tests are quick: what is killed, what survives, what a floor says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.mutation.driver import ROOT
from tests.mutation.run import is_below

pytestmark = pytest.mark.process


def mutate(*arguments):
    command = [sys.executable, "-m", "tests.mutation.run", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_places_are_tried_and_the_killers_named(tmp_path):
    done = mutate("attention/layouts.py", "--every", 12, "--matrix", tmp_path / "matrix")
    verdicts = [json.loads(line) for line in (tmp_path / "matrix").read_text(encoding="utf-8").splitlines()]
    killed = [verdict for verdict in verdicts if verdict["killers"]]
    assert done.returncode == 0, done.stderr
    assert f"| {len(verdicts)} | {len(killed)} (" in done.stdout
    assert all(killer.startswith("tests/attention/") for verdict in killed for killer in verdict["killers"])
    assert len(killed) > 0


def test_below_its_floor_it_fails():
    done = mutate("attention/layouts.py", "--every", 30, "--floor", 101)
    assert done.returncode == 1
    assert "FAILED" in done.stdout


@pytest.mark.parametrize(("killed", "counted", "is_too_few"), [(20, 30, False), (18, 30, True), (190, 300, True)])
def test_a_floor_allows_for_the_chance_in_a_small_sample(killed, counted, is_too_few):
    assert is_below(0.7, killed, counted) == is_too_few


def test_tests_that_all_start_processes_are_asked_nothing():
    program = """
from tests.mutation.driver import PACKAGE, Question, places_of
from tests.mutation.run import verdicts_of
print(verdicts_of(Question(places_of(PACKAGE / "forks.py"), ["tests/test_forks_processes.py"])))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done
