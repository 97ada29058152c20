"""Which test runs which line: a pytest plugin's part that runs once in a child, under coverage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest


@dataclass
class Reach:
    """What the tests do without any change."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of each test that passes."""
    failed: set[str] = field(default_factory=set)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=partial(defaultdict, partial(defaultdict, set)))
    """Of each file: the tests that run the line. Empty text: it runs while the tests are collected."""

    def update(self, other: Reach) -> None:
        self.seconds.update(other.seconds)
        self.failed |= other.failed
        for path, lines in other.lines.items():
            for line, tests in lines.items():
                self.lines[path][line] |= tests

    def tests_of(self, path: Path, statement: tuple[int, int]) -> set[str]:
        lines = self.lines.get(str(path), {})
        return set().union(*(lines.get(line, ()) for line in range(statement[0], statement[1] + 1)))


class Watched:
    """Runs lines of `folder` under coverage; who runs them is the context."""

    def __init__(self, folder: Path) -> None:
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=[f"{folder}/*"], messages=False)
        self._coverage.start()

    def switch(self, context: str) -> None:
        self._coverage.switch_context(context)

    def stop(self) -> dict[str, dict[int, list[str]]]:
        """The contexts of each line of each file."""
        self._coverage.stop()
        data = self._coverage.get_data()
        return {path: data.contexts_by_lineno(path) for path in data.measured_files()}


class ReachPlugin:
    """Runs `items` and notes what they reach."""

    def __init__(self, folder: Path, items: Sequence[pytest.Item]) -> None:
        self.reach = Reach()
        self._items = items
        self._test = ""
        self._watched = Watched(folder)

    def run(self) -> Reach:
        for item, following in zip(self._items, [*self._items[1:], None], strict=True):
            self._test = item.nodeid
            self._watched.switch(self._test)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self._test = ""
        for path, lines in self._watched.stop().items():
            for line, contexts in lines.items():
                self.reach.lines[path][line].update(*map(self._tests, contexts))
        for test in self.reach.failed:
            self.reach.seconds.pop(test, None)
        return self.reach

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reach.failed.add(report.nodeid)
        if report.when == "call" and report.passed:
            self.reach.seconds[report.nodeid] = 0
        if report.nodeid in self.reach.seconds:
            self.reach.seconds[report.nodeid] += report.duration

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """What a fixture of a file or of all of them does, all its tests rest on."""
        if fixturedef.scope != "function":
            self._watched.switch(f"below {request.node.nodeid}")
        try:
            return (yield)
        finally:
            self._watched.switch(self._test)

    def _tests(self, context: str) -> set[str]:
        if not context.startswith("below "):
            return {context}
        above = context.removeprefix("below ")
        return {item.nodeid for item in self._items if item.nodeid.startswith(above)}
