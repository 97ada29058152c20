"""A test without the mark `process` starts none: neither itself, nor its fixtures, nor the code that it tests.

A process costs a hundred times what a test costs, so `./scripts/test` leaves these tests out, all but a few: `smoke`.
Processes that start while nothing is tested, at imports and by pytest itself, are not looked at.
"""

from __future__ import annotations

import _posixsubprocess
import os
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "multiprocessing"})


class Guard:
    """Knows the test that runs, what it started, and the modules whose mark was for nothing so far."""

    def __init__(self) -> None:
        self._test: pytest.Item | None = None
        self._refused: list[str] = []
        self._idle_modules: dict[str, bool] = defaultdict(lambda: True)
        """Of modules with marked tests: whether none of these was skipped, and none started a process."""
        self._pid = os.getpid()
        # Sees what starts inside a library too, whoever has imported what. Python has no way to take a hook away.
        sys.addaudithook(self._audit)
        # How multiprocessing starts a process, which no audit event tells.
        fork_exec = _posixsubprocess.fork_exec

        def guarded(*arguments: object) -> int:
            self._audit("multiprocessing", arguments)
            return fork_exec(*arguments)

        _posixsubprocess.fork_exec = guarded

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        test = self._test
        if event not in STARTS or test is None or os.getpid() != self._pid:
            return
        if is_of_paddle(event, arguments) or is_download(event, arguments):
            return
        if test.get_closest_marker("process"):
            self._idle_modules[module_of(test)] = False
            return
        self._refused.append(f"{event} {arguments[:2] if event == 'subprocess.Popen' else ''}")
        raise RuntimeError(f"mark this test `process`: {test.nodeid} starts one by {self._refused[-1]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = item
        if item.get_closest_marker("process"):
            self._idle_modules[module_of(item)] &= True
        try:
            return (yield)
        finally:
            self._test = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._look_back(item, nextitem)

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None and "mark this test" in str(call.excinfo.value):
            self._refused.clear()  # told once

    def _look_back(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        refused, self._refused = self._refused, []
        # Production code may have caught what it was refused with.
        assert not refused, f"mark this test `process`: it starts one by {', '.join(refused)}"
        module = module_of(item)
        if item.config.option.idle_marks and (nextitem is None or module_of(nextitem) != module):
            assert not self._idle_modules.pop(module, False), (
                f"no test of {module} starts a process: take its marks away"
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._idle_modules[report.nodeid.partition("::")[0]] = False


def is_of_paddle(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether Paddle looks at the machine: at its import, in whichever test that is, and at its first operation."""
    spec = getattr(sys.modules.get("paddle"), "__spec__", None)
    return getattr(spec, "_initializing", False) or (event == "subprocess.Popen" and arguments[0] == "lscpu")


def is_download(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether pip brings the model, once for a machine: whichever test comes first."""
    command = arguments[1] if event == "subprocess.Popen" else ()
    return isinstance(command, list) and command[1:4] == ["-m", "pip", "download"]


def module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
