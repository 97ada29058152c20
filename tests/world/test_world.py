"""Fixed seeds of every scenario. `python -m tests.world SCENARIO --seeds 0-999` looks at more of them."""

import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.hunt import MUTANTS, SOURCES

from .__main__ import main
from .chance import FAULTS, numbers
from .ranks import Worker
from .scenarios import SCENARIOS
from .world import KEPT, Run, line, shrink, try_run

SEEDS = range(20)
RUNS = [*KEPT, *(Run(scenario, seed, range(500)) for scenario in SCENARIOS for seed in SEEDS)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.scenario} {run.seed}")
def test_no_law_is_broken(run):
    result = try_run(run)
    assert result.error is None, f"{result.error}\n{line(run)}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_replays_event_for_event(scenario):
    first, second = (try_run(Run(scenario, 3, range(300), check_every=1)) for _ in range(2))
    assert first == second
    assert len(first.trace) > 50


def test_what_is_left_out_does_not_change_what_others_choose():
    whole = try_run(Run("fastdeploy26", 1, range(40), frozenset(FAULTS), check_every=1))
    part = try_run(Run("fastdeploy26", 1, range(20, 40), frozenset(FAULTS), check_every=1))
    added = [[text for text in each.trace if " add " in text and not text.startswith("-")] for each in (whole, part)]
    prompts = [[text.split()[0] for text in each if int(text.split(":")[0]) >= 20] for each in added]
    assert prompts[0] == prompts[1] != []


def test_a_failure_shrinks_to_what_it_needs(monkeypatch):
    monkeypatch.setattr(Worker, "_prefill", lambda worker, task: 1 / 0)
    smallest = shrink(Run("fastdeploy26", 0, range(200)))
    assert len(smallest.tickets) <= 2
    assert smallest.off == frozenset(FAULTS)


def test_the_printed_line_replays_the_failure(monkeypatch, capsys):
    monkeypatch.setattr(Worker, "_prefill", lambda worker, task: 1 / 0)
    run = Run("fastdeploy26 file", 0, (3, *range(20, 90)), frozenset({"store lies", "late report"}), {"ranks": 2}, 1)
    expected = try_run(run)
    assert main(shlex.split(line(run))[3:]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == expected.error
    assert printed[2:-1] == expected.trace
    assert printed[-1].startswith("0 of 1 runs of 71 events kept every law.")


def test_tickets_may_be_told_as_ranges():
    assert numbers("3,7,12-15") == [3, 7, 12, 13, 14, 15]
    assert numbers("") == []


@pytest.mark.process
def test_a_seed_replays_bit_for_bit_in_another_process_from_the_sources_alone(tmp_path):
    """Also where Python hashes texts otherwise, and files lie elsewhere."""
    root = Path(__file__).parents[2]
    for name in (SOURCES.name, "tests"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    run = Run("embedded roles file", 3, range(200), check_every=1)
    command = [sys.executable, "-m", *shlex.split(line(run))[2:], "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(tmp_path)}
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    *trace, summary = printed.stdout.splitlines()
    assert trace == try_run(run).trace
    assert summary.startswith("1 of 1 runs of 200 events kept every law.")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place(mutant):
    compile(mutant.applied_to((SOURCES / mutant.file).read_text()), mutant.file, "exec")


def test_there_are_mutants_of_every_part():
    parts = Counter(mutant.name.partition(":")[0] for mutant in MUTANTS)
    assert parts >= Counter(scheduler=10, worker=10, storage=5, hosts=5)
