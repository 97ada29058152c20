"""FastDeploy's own unit tests, with our switch off and on: `scripts/test-fastdeploy --host`.

Each file runs in a process of its own, on a platform that says that it is CUDA. Tests that need a GPU fail the same
way both times. Exit status 1 when a test differs for any other reason than a refusal of ours.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from fastdeploy_kvcache_v1.switch import SWITCH

from .fastdeploy_trees import ROOT, VARIABLES

MODULE = "tests.fastdeploy.host_suites"
SUITES = ("v1", "engine", "splitwise", "cache_manager")
TEST_S, LIMIT_S = 30, 600
"""For one test, which fails then, and for one file; what that has not told by then counts as not run."""
REFUSAL = f"{SWITCH}=1 cannot serve this: "
PORTS = ("FD_API_PORT", "FD_ENGINE_QUEUE_PORT", "FD_METRICS_PORT", "FD_CACHE_QUEUE_PORT", "FD_CONTROLLER_PORT")
"""Where FastDeploy's tests listen. They kill any process there first, so it has to be theirs."""

RANKS = ("passed", "skipped", "refused", "failed")
"""What became of a test: the worst of its phases."""


class Outcome(NamedTuple):
    result: str
    reason: str = ""


NOT_RUN = Outcome("not run")


class Plugin:
    """Of pytest, in the process of one file: writes what became of each test, as it comes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_configure(self, config: pytest.Config) -> None:
        from fastdeploy_kvcache_v1 import plugin

        plugin.activate()
        from fastdeploy.platforms.base import Platform

        Platform.is_cuda = lambda platform: True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call):
        report = (yield).get_result()
        if report.failed:
            refusals = [str(error) for error in _chain(call.excinfo.value) if REFUSAL in str(error)]
            if refusals:
                self._write(report.nodeid, "refused", refusals[0].partition(REFUSAL)[2])
            else:
                self._write(report.nodeid, "failed", call.excinfo.exconly())
        else:
            self._write(report.nodeid, report.outcome, "")

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(report.nodeid, "failed", report.longreprtext)

    def _write(self, nodeid: str, result: str, reason: str) -> None:
        name, last = nodeid.partition("::")[2] or "(import)", (reason.strip().splitlines() or [""])[-1]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, result, last]) + "\n")


def _chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def run_file(tree: Path, path: Path, *, is_on: bool) -> tuple[dict[str, Outcome], str]:
    """What became of its tests, by name, and how its process ended; nothing for one that ended by itself."""
    with tempfile.TemporaryDirectory(prefix="host-suite-") as directory:
        results = Path(directory, "results")
        environment = {
            **os.environ,
            **dict(zip(PORTS, map(str, _free_ports(len(PORTS))), strict=True)),
            "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
            "FD_LOG_DIR": f"{directory}/log",
            "TMPDIR": directory,
            SWITCH: str(int(is_on)),
        }
        command = [sys.executable, "-m", MODULE, str(results), str(path), str(tree / "tests")]
        with Path(directory, "output").open("wb") as output:
            process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(LIMIT_S)
                ended = "" if status in (0, 1) and results.exists() else f"ended with status {status}"
            except subprocess.TimeoutExpired:
                ended = f"ended after {LIMIT_S} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _read(results), ended


def _read(results: Path) -> dict[str, Outcome]:
    """By test, the worst of its phases."""
    outcomes: dict[str, Outcome] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        name, result, reason = json.loads(line)
        if RANKS.index(result) >= RANKS.index(outcomes.get(name, Outcome("passed")).result):
            outcomes[name] = Outcome(result, reason)
    return outcomes


def _free_ports(number: int) -> list[int]:
    with ExitStack() as listening:
        sockets = [listening.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def differences(off: dict[str, Outcome], on: dict[str, Outcome]) -> dict[str, tuple[Outcome, Outcome]]:
    """Tests that end otherwise with the switch on: both outcomes, by name."""
    pairs = {name: (off.get(name, NOT_RUN), on.get(name, NOT_RUN)) for name in {**off, **on}}
    bad = ("failed", "refused")
    return {
        name: (before, after)
        for name, (before, after) in pairs.items()
        if before.result != after.result and not (before.result in bad and after.result in bad)
    }


def compare(release: str, tree: Path) -> int:
    """Prints the table of one release; returns how many tests differ for another reason than a refusal."""
    print(f"FastDeploy {release}: passed/failed with the switch off, and on ({TEST_S} s a test, {LIMIT_S} s a file)")
    totals, num_other = Counter(), 0
    for path in sorted(path for suite in SUITES for path in (tree / "tests" / suite).rglob("test_*.py")):
        (off, off_ended), (on, on_ended) = (run_file(tree, path, is_on=is_on) for is_on in (False, True))
        counts = [Counter(each.result for each in outcomes.values()) for outcomes in (off, on)]
        shown = [f"{count['passed']:>4}/{count['failed'] + count['refused']:<3}" for count in counts]
        notes = [f"{which} {ended}" for which, ended in (("off:", off_ended), ("on:", on_ended)) if ended]
        print(f"{path.relative_to(tree / 'tests')!s:<52}", *shown, "; ".join(notes), flush=True)
        for name, (before, after) in differences(off, on).items():
            num_other += after.result != "refused"
            print(f"    {name}: {before.result}, on: {after.result} {after.reason[:300]}", flush=True)
        totals.update({"off": counts[0]["passed"], "on": counts[1]["passed"], "refused": counts[1]["refused"]})
    print(
        f"FastDeploy {release}: {totals['off']} pass, {totals['on']} with the switch on; {totals['refused']} are "
        f"refused, {num_other} differ for another reason\n"
    )
    return num_other


def main() -> int:
    trees = {release: os.environ.get(variable) for release, variable in VARIABLES.items()}
    return int(sum(compare(release, Path(tree)) for release, tree in trees.items() if tree) > 0)


def run_here(results: str, path: str, root: str) -> int:
    """In the process of one file."""
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", root, f"--timeout={TEST_S}"]
    return pytest.main([*options, path], plugins=[Plugin(Path(results))])


if __name__ == "__main__":
    code = run_here(*sys.argv[1:]) if len(sys.argv) > 1 else main()
    sys.stdout.flush()
    os._exit(code)  # FastDeploy leaves threads behind
