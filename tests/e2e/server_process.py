"""A real server in its own process, for tests: started, watched, and ended without leftovers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.telemetry.metrics import PREFIX

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 5.0
"""Far below a lease's 60 s: what ends by a time-out alone is seen."""
PROGRAM = (sys.executable, "-m", "fastdeploy_kvcache_v1.cli")
SERVE = (*PROGRAM, "serve")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for: {what}"
        time.sleep(0.02)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that a server says which does not start; in this process, because it ends before it has others."""
    assert cli.main(["serve", "--model", "random", "--port", "0", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("fastdeploy-kvcache: error: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


def openai_client(url: str, *, timeout_s: float = 120.0) -> OpenAI:
    """Opens a connection for each request: a server that closes an idle one may do so just as it is used again."""
    headers = {"Connection": "close"}
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s, default_headers=headers)


class CommandProcess:
    """A command that says in one line that it is ready, with its URL."""

    def __init__(self, directory: Path, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        directory.mkdir(exist_ok=True)
        self.stderr_path = directory / "stderr"
        self._stdout_path = directory / "stdout"
        with self._stdout_path.open("wb") as stdout, self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **(environment or {})},
            )

    @property
    def stdout(self) -> str:
        return self._stdout_path.read_text()

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The ready line."""
        wait_until(lambda: "\n" in self.stdout or self.process.poll() is not None, "the ready line", timeout_s)
        assert self.process.poll() is None, self.stderr
        return self.stdout

    @property
    def urls(self) -> list[str]:
        """Several, where each data parallel engine has one."""
        return re.findall(r"http://\S+", self.stdout)

    @property
    def url(self) -> str:
        return self.urls[0]

    def client(self, engine: int = 0) -> OpenAI:
        return openai_client(self.urls[engine])


class ServerProcess(CommandProcess):
    """`serve` on a free port, with a temporary directory of its own; without `--model`, the random one."""

    def __init__(self, directory: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        # Not below `directory`: its name would be too long for unix sockets.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="kv-"))
        command = [*SERVE, "--model", "random", "--port", "0", *flags]
        super().__init__(directory, command, {"TMPDIR": str(self.temp_dir), **(environment or {})})
        self._descendants: dict[int, psutil.Process] = {}

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        line = super().wait_ready(timeout_s)
        self.remember_descendants()
        return line

    @property
    def worker(self) -> psutil.Process:
        """The worker process, which has the ports and caches."""
        return self._child("worker.process")

    def _child(self, module: str) -> psutil.Process:
        found = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if f"fastdeploy_kvcache_v1.lab.server.{module}" in child.cmdline()
        ]
        assert len(found) == 1
        return found[0]

    def check(self) -> dict[str, object]:
        report: dict[str, object] = httpx2.get(f"{self.url}/debug/check", timeout=30.0).json()
        return report

    def wait_idle(self) -> dict[str, object]:
        """Until no request is known; the report of the leak check that is then made."""
        wait_until(lambda: self.check().get("idle") is not False, "an idle server", IDLE_TIMEOUT_S)
        return self.check()

    def metrics(self, engine: int = 0) -> dict[str, float]:
        """Samples by name, labels in braces: `requests{state=running}`; our prefix is left out."""
        text = httpx2.get(f"{self.urls[engine]}/metrics", timeout=30.0).text
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                samples[sample.name.removeprefix(PREFIX) + (f"{{{labels}}}" if labels else "")] = sample.value
        return samples

    def remember_descendants(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self._descendants[child.pid] = child

    def wait_exit(self) -> int:
        return self.process.wait(EXIT_TIMEOUT_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.remember_descendants()
            self.process.send_signal(number)
        return self.wait_exit()

    def assert_nothing_left(self) -> None:
        """No process, no temporary directory, nobody listening."""
        wait_until(lambda: not any(child.is_running() for child in self._descendants.values()), "processes to end")
        assert list(self.temp_dir.iterdir()) == []
        if "http://" in self.stdout:
            try:
                httpx2.get(f"{self.url}/health")
            except httpx2.ConnectError:
                return
            raise AssertionError("somebody still listens")

    def kill(self) -> None:
        """Whatever state it is in: used on the way out of a test."""
        if self.process.poll() is None:
            self.remember_descendants()
            self.process.kill()
            self.process.wait()
        for child in self._descendants.values():
            with suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


@contextmanager
def started(directory: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A ready server; killed at the end if it still runs."""
    server = ServerProcess(directory, *flags, environment=environment)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()
