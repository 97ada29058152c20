"""The world: fixed seeds of every scenario, replay, shrinking, and its README. README.md has the commands."""

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
def test_no_seed_breaks_a_law(run):
    result = try_run(run)
    assert result.error is None, f"{result.error}\n{line(run)}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_replays_event_for_event(scenario):
    first, second = (try_run(Run(scenario, 3, range(300), check_every=1)) for _ in range(2))
    assert first == second
    assert len(first.trace) > 20


def test_a_run_with_fewer_tickets_keeps_the_choices_of_the_others():
    whole = try_run(Run("fastdeploy26", 1, range(40), frozenset(FAULTS), check_every=1))
    part = try_run(Run("fastdeploy26", 1, range(20, 40), frozenset(FAULTS), check_every=1))
    added = [[text for text in each.trace if " add " in text and not text.startswith("-")] for each in (whole, part)]
    prompts = [[text.split()[0] for text in each if int(text.split(":")[0]) >= 20] for each in added]
    assert prompts[0] == prompts[1] != []


def test_a_failing_run_shrinks_to_the_events_that_it_needs(monkeypatch):
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
    assert printed[2:-4] == expected.trace
    assert printed[-4] == "fastdeploy26 file: 1 run of 71 events"
    assert printed[-1] == "  laws      broken in 1 of 1 run: the command below each error replays it"


def test_a_run_reports_requests_faults_and_comparisons(capsys):
    ends, _, faults, checks = map(dict, try_run(Run("embedded", 54, range(60))).outcome)
    assert main(["embedded", "--seed", "54", "--events", "60"]) == 0
    title, requests, struck, laws = capsys.readouterr().out.splitlines()
    assert title == "embedded: 1 run of 60 events"
    assert requests == f"  requests  {sum(ends.values())} (finished {ends['finished']}, aborted {ends['aborted']})"
    assert struck == "  faults    1 (copy to host fails 1)"
    assert faults["copy to host fails"] == 1
    assert min(checks.values()) > 0
    assert laws == (
        f"  laws      all held: {checks['tokens']} tokens and {checks['positions']} cache reads compared, "
        f"{checks['checks']} checks of the whole cache"
    )


def test_without_a_scenario_every_scenario_runs(capsys):
    assert main(["--seed", "0", "--events", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    titles = [text.partition(":")[0] for text in printed if text.endswith("1 run of 1 event")]
    assert titles == list(SCENARIOS)
    assert printed[-1] == f"{len(SCENARIOS)} scenarios: no runs broke a law"


def test_an_unknown_scenario_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["embeded"])
    assert "unknown scenario 'embeded': choose among fastdeploy25, " in capsys.readouterr().err


def test_the_readme_shows_the_trace_that_its_command_prints(capsys):
    page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    block = page.partition("$ python -m tests.world ")[2].partition("```")[0]
    command, *shown = block.splitlines()
    traced = [text for text in shown if text and not text.startswith("#")]
    main(shlex.split(command))
    printed = capsys.readouterr().out.splitlines()
    assert len(traced) > 20
    assert traced == [*printed[: len(traced) - 4], *printed[-4:]]


def test_the_readme_names_every_scenario_and_every_fault():
    page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    assert [name for name in (*SCENARIOS, *FAULTS) if f"`{name}`" not in page] == []


def test_tickets_are_read_from_numbers_and_ranges():
    assert numbers("3,7,12-15") == [3, 7, 12, 13, 14, 15]
    assert numbers("") == []


@pytest.mark.process
def test_a_seed_replays_the_same_trace_in_another_process(tmp_path):
    """With another hash seed of Python, and from another folder."""
    root = Path(__file__).parents[2]
    for name in (SOURCES.name, "tests"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    run = Run("embedded roles file", 3, range(200), check_every=1)
    command = [sys.executable, "-m", *shlex.split(line(run))[2:], "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(tmp_path)}
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    *trace, title, _, _, laws = printed.stdout.splitlines()
    assert trace == try_run(run).trace
    assert title == "embedded roles file: 1 run of 200 events"
    assert laws.startswith("  laws      all held: ")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_each_mutant_is_in_its_file(mutant):
    compile(mutant.applied_to((SOURCES / mutant.file).read_text()), mutant.file, "exec")


def test_mutants_cover_every_part():
    parts = Counter(mutant.name.partition(":")[0] for mutant in MUTANTS)
    assert parts >= Counter(scheduler=10, worker=10, storage=5, hosts=5)
