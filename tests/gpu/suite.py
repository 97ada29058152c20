"""The CUDA suite and the benchmark of copies, in processes that may fail, hang or lose their GPU; no pytest.

`scripts/test-gpu` runs it, docs/operate/gpu.md says how. A group of checks has a process (`one_group.py`). A failure
ends that process, a check that takes too long is killed, and the rest of the group gets a new process. Each result is
printed and written at once. This file needs nothing but Python: the processes that it starts may lack anything.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACES = [ROOT, HERE, ROOT / "benchmarks", ROOT / "benchmarks/copy_gpu"]

DEADLINE_S = 60.0
"""For an import, and for each check."""

PART_S = 450.0
"""For the suite, and for the benchmark: each fits a command of eight minutes."""


class Group(NamedTuple):
    """Checks of one file, for one way to copy or for none."""

    module: str
    way: str = ""
    needed: bool = False
    """It fails if its packages are missing; others are left out."""
    patience: float = 1.0
    """How many deadlines a check has."""

    @property
    def name(self) -> str:
        return f"{self.module}/{self.way}" if self.way else self.module


WAYS = ("kernel", "batch", "spans")
ABOUT = Group("about", needed=True, patience=5.0)  # a trial has a time limit for each way itself
SUITE = (
    *(Group("copy_checks", way, needed=True) for way in WAYS),
    *(Group("worker_checks", way) for way in WAYS),
    *(Group(name) for name in ("worker_checks", "ipc_checks", "flash_checks")),
)
BENCHMARK = (
    *(Group("copy_gpu", way, needed=True) for way in WAYS),
    *(Group("beside_pass", way) for way in WAYS),
)


class Report:
    """Prints what happened, and writes it as lines of JSON."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"gpu-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{os.getpid()}.jsonl"
        self._file = self.path.open("w", encoding="utf-8")
        self.counts: dict[str, int] = {}
        self.failed: list[str] = []
        self.measured: list[dict[str, Any]] = []

    def close(self) -> None:
        self._file.close()

    def add(self, group: Group, check: str, result: str, **more: Any) -> None:
        """`result`: ok, FAILED, left out, or no time, as cases of the benchmark may end."""
        line = {"group": group.name, "check": check, "result": result, **more}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.counts[result] = self.counts.get(result, 0) + 1
        if result == "FAILED":
            self.failed.append(f"{group.name} {check}")
        self.measured += [line] if more.get("measured") else []
        measured = (f"{name}={value}" for name, value in more.get("measured", {}).items())
        print(f"{result:8} {group.name:22} {check}", *measured, flush=True)
        for text in filter(None, (more.get("said"), more.get("reason"))):
            print("         " + text.strip().replace("\n", "\n         "), flush=True)


class Child:
    """A process with the checks of a group, but those of `done`. Says what it does, a line of JSON each."""

    def __init__(self, group: Group, done: Sequence[str]) -> None:
        self._lines, theirs = os.pipe()
        self._unread = b""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        command = [sys.executable, str(HERE / "one_group.py"), str(theirs), group.module, group.way, *done]
        places = os.pathsep.join([*map(str, PLACES), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": places},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """What it says next; None when it has ended. Raises `TimeoutError`."""
        until = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if not select.select([self._lines], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"killed: it took more than {seconds:g} s")
            part = os.read(self._lines, 1 << 16)
            if not part:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def last_words(self) -> str:
        """How it ended, and the end of what it printed."""
        try:
            status = f"its process ended with {self._process.wait(10)}"
        except subprocess.TimeoutExpired:
            status = "its process does not end"
        self._output.seek(0)
        return "\n".join([status, *self._output.read().decode(errors="replace").splitlines()[-20:]])

    @property
    def ended_well(self) -> bool:
        return self._process.poll() == 0

    def end(self) -> None:
        """With all that it started. A process that the driver holds fast is left behind."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        os.close(self._lines)
        self._output.close()


class Run:
    """The checks of one group, by as many processes as it takes."""

    def __init__(self, group: Group, report: Report, deadline: float, until: float) -> None:
        self._group, self._report, self._until = group, report, until
        self._deadline = deadline * group.patience
        self._done: list[str] = []
        self._waiting: list[str] | None = None
        """Not known before the group was imported."""

    def all(self) -> None:
        while self._waiting is None or self._waiting:
            child = Child(self._group, self._done)
            try:
                goes_on = self._follow(child)
            finally:
                child.end()
            if not goes_on:
                break

    def _follow(self, child: Child) -> bool:
        """Until it has ended. False where another one would do no better."""
        current = "import"
        try:
            while (said := child.next(self._deadline)) is not None:
                if "left_out" in said:
                    self._add("import", "FAILED" if self._group.needed else "left out", reason=said["left_out"])
                    return False
                if "checks" in said:
                    self._waiting, current = said["checks"], ""
                elif "begins" in said:
                    current = said["begins"]
                else:
                    self._add(current, **said)
                    current = ""
                    if said["result"] == "FAILED":
                        return True
                if time.monotonic() > self._until:
                    return self._give_up("no time" if self._group in BENCHMARK else "FAILED")
            problem = child.last_words()
            if child.ended_well and not current and not self._waiting:
                return False
        except TimeoutError as error:
            problem = str(error)
        self._add(current or "end", "FAILED", reason=problem)
        return current not in ("import", "") or self._give_up("FAILED")

    def _add(self, check: str, result: str, **more: Any) -> None:
        if self._waiting and check in self._waiting:
            self._waiting.remove(check)
            self._done.append(check)
        self._report.add(self._group, check, result, **more)

    def _give_up(self, result: str) -> bool:
        if self._waiting:
            self._report.add(self._group, f"{len(self._waiting)} checks", result, not_run=self._waiting)
        return False


def run(groups: Iterable[Group], report: Report, deadline: float, seconds: float) -> None:
    until = time.monotonic() + seconds
    for group in groups:
        Run(group, report, deadline, until).all()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", action="store_true", help="the checks only")
    parser.add_argument("--benchmark", action="store_true", help="the benchmark of copies only")
    parser.add_argument("--only", default="", metavar="GROUP", help="groups whose name begins so, as copy_checks/batch")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", metavar="DIR")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="of one check (%(default)s s)")
    parser.add_argument("--seconds", type=float, default=PART_S, metavar="S", help="of each part (%(default)s s)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    with closing(Report(options.results)) as report:
        return run_parts(options, report)


def run_parts(options: argparse.Namespace, report: Report) -> int:
    suite, benchmark = ([each for each in part if each.name.startswith(options.only)] for part in (SUITE, BENCHMARK))
    run([ABOUT], report, options.deadline, options.seconds)
    if options.suite or not options.benchmark:
        run(suite, report, options.deadline, options.seconds)
    if options.benchmark or not options.suite:
        for group in benchmark:  # no way takes the time of another
            run([group], report, options.deadline, options.seconds / len(benchmark))
        sys.path += map(str, PLACES)
        from copy_gpu import table

        print(table(report.measured))
    print(", ".join(f"{count} {result}" for result, count in report.counts.items()), f"({report.path})")
    for name in report.failed:
        print(f"failed: {name}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # takes its process along
    sys.exit(main())
