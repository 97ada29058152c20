"""Tries mutants inside one pytest session: tests are collected once, then a forked child runs some on each mutant.

A child first puts the changed function in the place of the loaded one. So a mutant costs what its tests cost.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.children import run_all
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.reach import Reach, ReachPlugin, Watched
from tests.mutation.replaced import LoadedFunctions

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fastdeploy_kvcache_v1"
EARLY_SECONDS = 600
"""For tests on a function that runs while they are collected: their process begins anew."""


@dataclass(frozen=True)
class Place:
    """A mutant and where it stands."""

    path: Path
    mutant: Mutant
    text: str
    """The line of the source."""

    @property
    def module(self) -> str:
        return str(self.path.relative_to(PACKAGE))

    @property
    def key(self) -> str:
        """What stays the same when lines move."""
        was, now = (" ".join(text.split()) for text in (self.mutant.was, self.mutant.now))
        return f"{self.module} {self.mutant.function}: `{was}` -> `{now}` in `{self.text}`"

    def __str__(self) -> str:
        return self.key.replace(".py ", f".py:{self.mutant.line} ", 1)


@dataclass(frozen=True)
class Verdict:
    place: Place
    killers: tuple[str, ...]
    """The tests that failed: the first one, or with a matrix all. A mutant that ends the process is killed too."""
    reached: int
    """How many tests run its line."""


def places_of(path: Path) -> list[Place]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    return [Place(path, mutant, lines[mutant.line - 1].strip()) for mutant in mutants(source)]


@dataclass(frozen=True)
class Question:
    """What is asked: these places, of these tests."""

    places: Sequence[Place]
    tests: Sequence[str]
    last_tests: Sequence[str] = ()
    """These are asked when all others have passed."""
    matrix: bool = False
    jobs: int = 1
    deadline: Callable[[], bool] = lambda: False
    """Whether the time is over."""
    ended: Callable[[Verdict], None] = lambda verdict: None


def in_process(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Without the tests that are marked `process`."""
    return [item for item in items if item.get_closest_marker("process") is None]


def ask(question: Question) -> list[Verdict]:
    """One verdict for each place, unless the time is over before."""
    os.environ["CI"] = "1"  # the same examples each time
    session = _Session(question)
    options = ["-qq", "-s", "-p", "no:cacheprovider", "--no-header", "--timeout=0"]
    code = pytest.main([*options, *question.tests, *question.last_tests], plugins=[session])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # all of them start processes: they can say nothing here
        return []
    if code != pytest.ExitCode.OK:
        raise SystemExit("error: the tests cannot be collected: run scripts/test first")
    return session.verdicts


class _Session:
    """The plugin of the parent's session."""

    def __init__(self, question: Question) -> None:
        self.verdicts: list[Verdict] = []
        self._question = question
        self._imports = Watched(PACKAGE)
        self._reach = Reach()
        self._kills: defaultdict[tuple[Path, str], Counter[str]] = defaultdict(Counter)
        self._sound: dict[str, bool] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = in_process(items)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        imported = self._imports.stop()
        if session.testsfailed:
            raise session.Failed("some tests cannot be collected")
        self._items = {item.nodeid: item for item in session.items}
        self._order = {test: number for number, test in enumerate(self._items)}
        self._loaded = LoadedFunctions(PACKAGE)
        gc.collect()
        gc.freeze()
        self._look_around()
        self._early = {path: set(lines) for path, lines in imported.items()}
        for verdict in self._try_all():
            self.verdicts.append(verdict)
            self._question.ended(verdict)
        return True

    def _look_around(self) -> None:
        """Runs all tests once, a file in one child."""
        files: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
        for item in self._items.values():
            files[item.path].append(item)
        shares: list[list[pytest.Item]] = [[] for _ in range(self._question.jobs)]
        for items in sorted(files.values(), key=len, reverse=True):
            min(shares, key=len).extend(items)
        tasks = ((share, float("inf")) for share in shares if share)
        for ended in run_all(tasks, _reach_of, self._question.jobs):
            if not ended.finished:
                raise SystemExit("error: the tests end their process: run scripts/test first")
            self._reach.update(ended.result)
        for test in sorted(self._reach.failed):
            print(f"left out, it fails without any change: {test}", flush=True)

    def _try_all(self) -> Iterator[Verdict]:
        again: list[tuple[Place, list[str]]] = []
        yield from self._try(((place, self._tests(place)) for place in self._question.places), again)
        while again:
            once, again = again, []
            yield from self._try(((place, self._tests(place)) for place, _ in once), again)

    def _try(self, tried: Iterator[tuple[Place, list[str]]], again: list[tuple[Place, list[str]]]) -> Iterator[Verdict]:
        unreached: list[Place] = []

        def tasks() -> Iterator[tuple[Any, float]]:
            for place, tests in tried:
                if self._question.deadline():
                    return
                if tests:
                    yield (place, tests), 120 + 10 * sum(self._reach.seconds[test] for test in tests)
                else:
                    unreached.append(place)

        run = partial(_try_mutant, self)
        for ended in run_all(tasks(), run, self._question.jobs):
            place, tests = ended.task
            if ended.result == "no program":
                continue
            told = ended.result or []
            killers = told if ended.finished or told else ["the process ends"]
            unsound = [test for test in killers if not self._is_sound(test)]
            if unsound and unsound == killers[: len(unsound)]:
                again.append((place, tests))
                continue
            killers = [test for test in killers if test not in unsound]
            if not killers and self._runs_early(place):
                killers = self._try_early(place)
            self._kills[place.path, place.mutant.function].update(killers[:1])
            yield Verdict(place, tuple(killers), len(tests))
        for place in unreached:
            yield Verdict(place, tuple(self._try_early(place)) if self._runs_early(place) else (), 0)

    def _tests(self, place: Place) -> list[str]:
        """Those that reach the place: first what killed in the same function, then the quickest."""
        tests = self._reach.tests_of(place.path, place.mutant.statement) & self._reach.seconds.keys()
        tests -= {test for test, sound in self._sound.items() if not sound}
        if self._question.matrix:
            return sorted(tests, key=self._order.__getitem__)
        kills = self._kills[place.path, place.mutant.function]
        last = tuple(self._question.last_tests)
        return sorted(
            tests,
            key=lambda test: (bool(last) and test.startswith(last), -kills[test], self._reach.seconds[test], test),
        )

    def _is_sound(self, test: str) -> bool:
        """Whether the test passes alone and without any change. What kills must."""
        if test in self._items and test not in self._sound:
            task = ((None, [test]), 120 + 10 * self._reach.seconds[test])
            (ended,) = run_all(iter([task]), partial(_try_mutant, self), 1)
            self._sound[test] = ended.finished and not ended.result
            if not self._sound[test]:
                print(f"left out, it fails alone and without any change: {test}", flush=True)
        return self._sound.get(test, True)

    def _runs_early(self, place: Place) -> bool:
        first, last = place.mutant.statement
        return not self._early.get(str(place.path), set()).isdisjoint(range(first, last + 1))

    def _try_early(self, place: Place) -> list[str]:
        """A function that runs while tests are collected: a process that begins with the changed module."""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as changed:
            changed.write(place.mutant.applied_to(place.path.read_text(encoding="utf-8")))
            changed.flush()
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutation.early"]
            command = [sys.executable, "-m", "pytest", *options, *self._question.tests, *self._question.last_tests]
            environment = {**os.environ, "MUTANT": f"{place.path}:{changed.name}"}
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=EARLY_SECONDS)
                if done.returncode == 0:
                    return []
        return ["a process that begins with it"]


def _reach_of(items: list[pytest.Item], tell: Callable[[Any], None]) -> Reach:
    plugin = ReachPlugin(PACKAGE, items)
    items[0].config.pluginmanager.register(plugin)
    return plugin.run()


def _try_mutant(session: _Session, task: tuple[Place | None, list[str]], tell: Callable[[Any], None]) -> Any:
    """In the child: the tests that fail, the first or with a matrix all of them."""
    place, tests = task
    if place is not None:
        changed = place.mutant.applied_to(place.path.read_text(encoding="utf-8"))
        try:
            session._loaded.replace(place.path, place.mutant.first, place.mutant.function, changed)
        except SyntaxError:
            return "no program"
    failures = _Failures()
    items = [session._items[test] for test in tests]
    items[0].config.pluginmanager.register(failures)

    def over(number: int, frame: object) -> None:
        """The test loops or waits for ever."""
        tell([*failures.tests, failures.running])
        os._exit(1)

    signal.signal(signal.SIGVTALRM, over)
    signal.signal(signal.SIGALRM, over)
    for item, following in zip(items, [*items[1:], None], strict=True):
        failures.running = item.nodeid
        usual = session._reach.seconds[item.nodeid]
        signal.setitimer(signal.ITIMER_VIRTUAL, 3 + 10 * usual)
        signal.setitimer(signal.ITIMER_REAL, 20 + 20 * usual)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failures.tests and not session._question.matrix:
            break
    return failures.tests


class _Failures:
    def __init__(self) -> None:
        self.tests: list[str] = []
        self.running = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)
