"""Mutation testing: changes the package one place at a time and runs the tests that reach the place.

`scripts/mutate --help` and docs/develop/testing.md tell more.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.mutation import report
from tests.mutation.children import run_all
from tests.mutation.driver import PACKAGE, ROOT, Place, Question, Verdict, ask, places_of

LAST_COMMITS = 20
"""What counts as changed where no tag and no other branch tells."""

FEWEST = 10
"""Of so many changes a share means something: where little changed, more of its places are tried."""


def main() -> int:
    arguments = parse()
    modules = changed_modules() if arguments.changed else [m for name in arguments.names for m in modules_of(name)]
    by_folder: defaultdict[str, list[Place]] = defaultdict(list)
    for module in dict.fromkeys(modules):
        by_folder[folder_of(module)] += places_of(module)
    if not by_folder:
        print("no module of the package changed: nothing to mutate")
        return 0
    rng = random.Random(arguments.seed)
    rows: dict[str, str] = {}
    killed = counted = 0
    if arguments.matrix:
        arguments.matrix.write_text("")
    for folder, places in by_folder.items():
        chosen = chosen_of(places, arguments, rng)
        print(f"{folder}: {len(chosen)} of {len(places)} places", flush=True)
        known = report.judgements(folder)

        def ended(verdict: Verdict, known: dict[str, str] = known) -> None:
            if not verdict.killers:
                reason = known.get(verdict.place.key) or ("" if verdict.reached else "NOT REACHED")
                print(f"{verdict.place}{reason and '  # ' + reason}", flush=True)

        question = Question(
            chosen,
            tests_of(folder),
            tuple(arguments.also),
            matrix=arguments.matrix is not None,
            jobs=arguments.jobs,
            deadline=share_of(arguments.seconds / len(by_folder)),
            ended=ended,
        )
        verdicts = verdicts_of(question)
        rows[folder] = report.row(folder, len(places), verdicts)
        killed += sum(bool(verdict.killers) for verdict in verdicts)
        counted += sum(counts(folder, verdict, known) for verdict in verdicts)
        if arguments.matrix:
            with arguments.matrix.open("a") as matrix:
                matrix.writelines(map(json_line, verdicts))
    print("\n" + report.HEADER + "\n".join(rows.values()))
    if arguments.report:
        report.write(rows)
    if is_below(arguments.floor / 100, killed, counted):
        print(f"FAILED: tests noticed {killed} of {counted} changes, the floor is {arguments.floor:g} %")
        return 1
    return 0


def counts(folder: str, verdict: Verdict, known: dict[str, str]) -> bool:
    """For the floor. Much of the lab is reached only by tests that start processes, which are not asked."""
    is_excused = verdict.place.key in known or (folder.startswith("lab/") and not verdict.reached)
    return bool(verdict.killers) or not is_excused


def is_below(floor: float, killed: int, counted: int) -> bool:
    """By more than the standard deviation of a sample of this size: others would not say the same."""
    deviation = math.sqrt(max(0.0, counted * floor * (1 - floor)))
    return killed < counted * floor - deviation


def share_of(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since it was asked first: when a folder's tests were seen to pass."""
    begun: list[float] = []

    def is_over() -> bool:
        begun.append(time.monotonic())
        return begun[-1] - begun[0] > seconds

    return is_over


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate",
        description="Changes a place of the package and runs the tests that reach it. Prints what no test notices.",
    )
    parser.add_argument("names", nargs="*", metavar="FOLDER_OR_MODULE", help="scheduler, scheduler/run.py, cli.py ...")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every N-th place")
    parser.add_argument("--sample", type=int, metavar="N", help="try N places of each folder, the same ones each day")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another sample")
    parser.add_argument("--also", nargs="+", default=[], metavar="TESTS", help="ask these where all others pass")
    parser.add_argument(
        "--matrix", type=Path, metavar="FILE", help="run all tests that reach a place; JSON lines of who kills what"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="children at a time")
    parser.add_argument("--report", action="store_true", help="write the table of docs/develop/testing.md")
    parser.add_argument("--changed", action="store_true", help="modules that changed since the last tag or main")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="start nothing after so long")
    parser.add_argument("--floor", type=float, default=0, metavar="PERCENT", help="fail where fewer are killed")
    arguments = parser.parse_args()
    if bool(arguments.names) == arguments.changed:
        parser.error("name folders and modules, or say --changed")
    return arguments


def modules_of(name: str) -> list[Path]:
    """The modules that a folder, a path, or a file name without `.py` means."""
    path = PACKAGE / name.removeprefix(f"{PACKAGE.name}/").rstrip("/")
    if path.is_dir():
        found = sorted(path.rglob("*.py"))
    else:
        found = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(PACKAGE.rglob(f"{name}.py"))
    if not found:
        raise SystemExit(f"error: the package has no folder and no module {name}")
    return found


def folder_of(module: Path) -> str:
    """The folder below the package or `lab`, or a module beside these folders that has tests of its own; else `.`."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    name = "/".join(parts[: 1 + (parts[0] == "lab")])
    return name if (PACKAGE / name).is_dir() or own_tests(name).is_file() else "."


def own_tests(name: str) -> Path:
    folder, _, module = name.rpartition("/")
    return ROOT / "tests" / folder / f"test_{module}.py"


USERS = {
    "contract": ("scheduler", "worker", "telemetry", "storage/engine", "test_doctor.py", "test_cli.py"),
    "telemetry": ("contract", "scheduler/test_cache_manager.py", "fastdeploy_integration/engine/test_metrics.py"),
}
"""Tests of rooms whose users show what they are for."""


def tests_of(folder: str) -> list[str]:
    """The folder's tests, and those of `USERS`; those of the package's own modules lie in tests/ itself."""
    if folder == ".":
        return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))
    if own_tests(folder).is_file():
        return [str(own_tests(folder).relative_to(ROOT))]
    if not (ROOT / "tests" / folder).is_dir():
        raise SystemExit(f"error: there is no tests/{folder}")
    return [f"tests/{each}" for each in (folder, *USERS.get(folder, ()))]


def changed_modules() -> list[Path]:
    changed = [ROOT / path for path in git("diff", "--name-only", base(), "--", PACKAGE.name).splitlines()]
    return [path for path in changed if path.suffix == ".py" and path.exists()]


def base() -> str:
    """The last tag; else where this branch left main; else some commits ago, or as far as a shallow clone goes back."""
    head = git("rev-parse", "HEAD")
    for command in (["describe", "--tags", "--abbrev=0", "HEAD^"], ["merge-base", "HEAD", "origin/main"]):
        found = git(*command)
        if found and git("rev-parse", f"{found}^{{commit}}") != head:
            return found
    return git("rev-list", "--first-parent", f"--max-count={LAST_COMMITS}", "HEAD").split()[-1]


def git(*command: str) -> str:
    """What git says; empty where it fails."""
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def chosen_of(places: list[Place], arguments: argparse.Namespace, rng: random.Random) -> list[Place]:
    every = min(arguments.every, max(1, len(places) // FEWEST)) if arguments.changed else arguments.every
    places = places[::every]
    if arguments.sample and arguments.sample < len(places):
        places = [places[number] for number in sorted(rng.sample(range(len(places)), arguments.sample))]
    if arguments.seconds != float("inf"):
        rng.shuffle(places)  # where the time is over, the sample is smaller but no less random
    return places


def verdicts_of(question: Question) -> Sequence[Verdict]:
    """Asks in a child of its own: a folder's tests load much."""
    tell: Callable[[Question, object], list[Verdict]] = lambda question, _: ask(question)  # noqa: E731
    (ended,) = run_all(iter([(question, float("inf"))]), tell, 1, quiet=False)
    if not ended.finished:
        raise SystemExit(1)
    verdicts: list[Verdict] = ended.result
    return verdicts


def json_line(verdict: Verdict) -> str:
    place = verdict.place
    said = {
        "place": f"{place.module}:{place.mutant.line}",
        "key": place.key,
        "asked": verdict.reached,
        "killers": verdict.killers,
    }
    return json.dumps(said) + "\n"


if __name__ == "__main__":
    sys.exit(main())
