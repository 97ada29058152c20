"""FastDeploy's own server on a CPU worker, in its own processes: started, asked, and ended without leftovers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_kvcache_v1.copy_totals import CopyTotals, RankCopies
from fastdeploy_kvcache_v1.model.random_directory import write_random_directory

from .fastdeploy_trees import ROOT, tree

START_TIMEOUT_S = 480.0
"""A minute is usual; beside other work on two cores, four were not enough."""
EXIT_TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
LOCKS = Path("/tmp")

BLOCK_SIZE = 64
MAX_MODEL_LEN = 896
FLAGS = ("--max-num-seqs", "8", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "512")


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for: {what() if callable(what) else what}"
        time.sleep(0.1)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    text: str
    cached_tokens: int
    finish_reason: str


class CpuServer:
    """`serve --fastdeploy-cpu` on free ports, with a temporary directory of its own."""

    def __init__(
        self,
        release: str,
        directory: Path,
        *flags: str,
        manager: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        """What `environment` says of PYTHONPATH comes behind FastDeploy and this package."""
        environment = environment or {}
        directory.mkdir(parents=True, exist_ok=True)
        self.logs = directory / "log"
        self.model = directory / "model"
        if not self.model.exists():
            write_random_directory(self.model)
        # Not below `directory`: its name would be too long for unix sockets.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="kv-"))
        self._shared_memory = _names(SHARED_MEMORY)
        self._locks = _names(LOCKS)
        self._stdout, self._stderr = directory / "stdout", directory / "stderr"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "serve", "--fastdeploy-cpu", "--port", "0"),
                    *("--model", str(self.model), "--log-dir", str(self.logs), "--served-model-name", "tiny"),
                    *("--start-timeout", str(START_TIMEOUT_S)),
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={
                    **os.environ,
                    "ENABLE_V1_KVCACHE_MANAGER": "1" if manager else "0",
                    "TMPDIR": str(self.temp_dir),
                    **environment,
                    "PYTHONPATH": os.pathsep.join([str(tree(release)), str(ROOT), environment.get("PYTHONPATH", "")]),
                },
            )

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"http://\S+", self._stdout.read_text())
        assert found is not None, self.stderr
        return found.group()

    def wait_ready(self) -> None:
        ready = lambda: "http://" in self._stdout.read_text()  # noqa: E731
        wait_until(lambda: ready() or self.process.poll() is not None, "the ready line", START_TIMEOUT_S)
        assert ready(), self.stderr

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0)

    def ask(self, client: OpenAI, messages: list[dict[str, str]], **options: Any) -> Answer:
        """One chat request, not streamed. Greedy by top_p: release 2.5 makes 1 of temperature 0."""
        extra = {"return_token_ids": True, **options.pop("extra_body", {})}
        defaults: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "top_p": 0}
        reply = client.chat.completions.create(
            model="tiny", messages=messages, extra_body=extra, **{**defaults, **options}
        )
        choice = reply.choices[0]
        return Answer(
            tuple(choice.message.completion_token_ids),
            choice.message.content or "",
            reply.usage.prompt_tokens_details.cached_tokens,
            choice.finish_reason,
        )

    def control(self, name: str, **arguments: Any) -> dict[str, Any]:
        """A control request, which has to succeed."""
        call = httpx.get if name == "is_paused" else httpx.post
        options = {"json": arguments} if arguments else {}
        reply = call(f"{self.url}/v1/{name}", timeout=120.0, **options)
        assert reply.status_code == httpx.codes.OK, reply.text
        content: dict[str, Any] = reply.json() if reply.content else {}
        return content

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over their labels (some gauges come by process); our prefix is left out."""
        text = httpx.get(f"{self.url}/metrics", timeout=30.0).text
        samples: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name.removeprefix("fastdeploy:").removeprefix("kvcache_v1_")] += sample.value
        return samples

    def worker_copies(self) -> RankCopies:
        """What the worker really copied."""
        path = self.logs / "cpu_worker.json"
        if not path.exists():  # before the first copy
            return RankCopies()
        content = json.loads(path.read_text())
        return RankCopies(CopyTotals(**content["swap_in"]), CopyTotals(**content["swap_out"]))

    def failed_copies(self) -> int:
        copies = self.worker_copies()
        return copies.swap_in.failures + copies.swap_out.failures

    def processes(self) -> list[psutil.Process]:
        """All of the server but the first, found by the arguments or the title that only they have."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        """By rank, which Paddle has in the environment where there are several."""
        found = [
            each for each in self.processes() if {"worker"} < set(each.cmdline()) and "--engine_pid" in each.cmdline()
        ]
        return sorted(found, key=lambda each: int(each.environ().get("PADDLE_TRAINER_ID", "0")))

    def worker(self) -> psutil.Process:
        (worker,) = self.workers()
        return worker

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Exit status; nothing may be left then."""
        known = self.processes() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(EXIT_TIMEOUT_S)
        self.assert_nothing_left(known)
        return status

    def assert_nothing_left(self, known: list[psutil.Process]) -> None:
        alive = lambda each: each.is_running() and each.status() != psutil.STATUS_ZOMBIE  # noqa: E731
        wait_until(lambda: not any(alive(each) for each in known), "processes to end", EXIT_TIMEOUT_S)
        wait_until(lambda: not list(self.temp_dir.iterdir()), "temporary files to go", EXIT_TIMEOUT_S)
        wait_until(lambda: not self._left_over(), lambda: f"these files to go: {self._left_over()}", EXIT_TIMEOUT_S)

    def _left_over(self) -> set[Path]:
        """New files that no process uses: none of ours lives any more, and other servers may run beside it."""
        memory = {SHARED_MEMORY / name for name in _names(SHARED_MEMORY) - self._shared_memory}
        locks = {LOCKS / name for name in _names(LOCKS) - self._locks if name.startswith("fd_weight")}
        new = memory | locks
        return new - _in_use() if new else new

    def kill(self) -> None:
        """Whatever state it is in: used on the way out of a test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()  # its supervisor ends the others
                self.process.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def _in_use() -> set[Path]:
    """Files that some process has open or mapped, or sockets that it is bound to."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    used = {Path(line.split(maxsplit=7)[7]) for line in sockets if "/" in line}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            used |= {
                Path(line.split(maxsplit=5)[5]) for line in (process / "maps").read_text().splitlines() if "/" in line
            }
            used |= {link.readlink() for link in (process / "fd").iterdir()}
    return used


@contextmanager
def started(
    release: str, directory: Path, *flags: str, manager: bool = True, environment: dict[str, str] | None = None
) -> Iterator[CpuServer]:
    """A ready server; ended at the end if it still runs."""
    server = CpuServer(release, directory, *FLAGS, *flags, manager=manager, environment=environment)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()
