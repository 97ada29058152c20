"""FastDeploy's own server on a CPU worker, in its own processes: started, asked, and ended without leftovers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import psutil
from openai import OpenAI

from fastdeploy_kvcache_v1.contract.messages import CopyTotals, RankCopies
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.runner import stats_file
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.settings import free_ports
from fastdeploy_kvcache_v1.storage import child
from tests.e2e.server_process import EXIT_TIMEOUT_S, ServerProcess

from .fastdeploy_trees import ROOT, tree
from .models import PLAIN, Model

START_TIMEOUT_S = 480.0
"""A minute is usual; beside other work on two cores, four were not enough."""
SHARED_MEMORY = Path("/dev/shm")
LOCKS = Path("/tmp")

BLOCK_SIZE = 64
MAX_MODEL_LEN = 896
Messages = list[dict[str, str]]
NONE: Mapping[str, str] = MappingProxyType({})

FLAGS = ("--max-num-seqs", "8", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "512")


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for: {what() if callable(what) else what}"
        time.sleep(0.1)


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    cached_tokens: int
    finish_reason: str


def ask(client: OpenAI, said: str | Messages, **options: Any) -> Answer:
    """One chat request, not streamed. Greedy by top_p: release 2.5 makes 1 of temperature 0."""
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    messages = user(said) if isinstance(said, str) else said
    given: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "top_p": 0, **options}
    reply = client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **given)
    message, details = reply.choices[0].message, reply.usage.prompt_tokens_details
    return Answer(
        tuple(message.prompt_token_ids or ()),
        tuple(message.completion_token_ids),
        message.content or "",
        details.cached_tokens if details else 0,
        reply.choices[0].finish_reason,
    )


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


class CpuServer(ServerProcess):
    """`serve --fastdeploy-cpu`."""

    def __init__(
        self,
        release: str,
        directory: Path,
        *flags: str,
        manager: bool = True,
        environment: Mapping[str, str] = NONE,
        model: Model = PLAIN,
        engines: int = 1,
    ) -> None:
        """What `environment` says of PYTHONPATH comes behind FastDeploy and this package. `engines`: data parallel."""
        self.logs, self.model = directory / "log", directory / "model"
        self._worker_logs = self.logs if engines == 1 else self.logs / "log_0"
        if not self.model.exists():
            model.write(self.model)
        self._ports = free_ports("127.0.0.1", *[0] * 3 * engines)
        self._before = named_by(self._ports)
        port, queue_port, cache_queue_port = (
            ",".join(map(str, self._ports[each * engines : (each + 1) * engines])) for each in range(3)
        )
        super().__init__(
            directory,
            *("--fastdeploy-cpu", "--model", str(self.model), "--served-model-name", "tiny"),
            *("--log-dir", str(self.logs), "--start-timeout", str(START_TIMEOUT_S)),
            *("--ports", port, "--engine-worker-queue-port", queue_port, "--cache-queue-port", cache_queue_port),
            *("--data-parallel-size", str(engines)),
            *FLAGS,
            *flags,
            environment={
                "ENABLE_V1_KVCACHE_MANAGER": "1" if manager else "0",
                "FD_ATTENTION_BACKEND": model.attention_backend,
                **environment,
                "PYTHONPATH": os.pathsep.join([str(tree(release)), str(ROOT), environment.get("PYTHONPATH", "")]),
            },
        )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        return super().wait_ready(timeout_s)

    def control(self, name: str, **arguments: Any) -> dict[str, Any]:
        """A control request, which has to succeed."""
        call = httpx2.get if name == "is_paused" else httpx2.post
        options = {"json": arguments} if arguments else {}
        reply = call(f"{self.url}/v1/{name}", timeout=120.0, **options)
        assert reply.status_code == httpx2.codes.OK, reply.text
        content: dict[str, Any] = reply.json() if reply.content else {}
        return content

    def metrics(self, engine: int = 0) -> dict[str, float]:
        """Summed over their labels: some gauges come by process."""
        totals: dict[str, float] = defaultdict(float)
        for name, value in super().metrics(engine).items():
            totals[name.partition("{")[0].removeprefix("fastdeploy:")] += value
        return totals

    def worker_copies(self, rank: int = 0) -> RankCopies:
        """What a worker really copied."""
        path = stats_file(self._worker_logs, rank)
        if not path.exists():  # before the first copy
            return RankCopies()
        content = json.loads(path.read_text())
        return RankCopies(CopyTotals(**content["swap_in"]), CopyTotals(**content["swap_out"]))

    def failed_copies(self, rank: int = 0) -> int:
        copies = self.worker_copies(rank)
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

    def stores(self) -> list[psutil.Process]:
        """The store process of each engine, in no order."""
        return [each for each in self.processes() if child.__name__ in each.cmdline()]

    def worker(self) -> psutil.Process:
        (worker,) = self.workers()
        return worker

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Exit status; nothing may be left then."""
        status = super().stop(number)
        self.assert_nothing_left()
        return status

    def assert_nothing_left(self) -> None:
        alive = lambda each: each.is_running() and each.status() != psutil.STATUS_ZOMBIE  # noqa: E731
        known = self._descendants.values()
        wait_until(lambda: not any(alive(each) for each in known), "processes to end", EXIT_TIMEOUT_S)
        wait_until(lambda: not list(self.temp_dir.iterdir()), "temporary files to go", EXIT_TIMEOUT_S)
        left_over = lambda: named_by(self._ports) - self._before  # noqa: E731
        wait_until(lambda: not left_over(), lambda: f"these files to go: {left_over()}", EXIT_TIMEOUT_S)

    def kill(self) -> None:
        """Whatever state it is in: used on the way out of a test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.wait_exit()
            except subprocess.TimeoutExpired:
                self.process.kill()  # its supervisor ends the others
                self.process.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def named_by(ports: Sequence[int], directories: Sequence[Path] = (SHARED_MEMORY, LOCKS)) -> set[Path]:
    """What is named by one of these ports, as all that FastDeploy puts there: whatever else comes is another's."""
    one_of_them = re.compile(rf"(?<!\d)({'|'.join(map(str, ports))})(?!\d)")
    return {path for directory in directories for path in directory.iterdir() if one_of_them.search(path.name)}


@contextmanager
def started(release: str, directory: Path, *flags: str, **options: Any) -> Iterator[tuple[CpuServer, OpenAI]]:
    """A ready server and a client; what the server says at its end is right unless it has ended before."""
    server = CpuServer(release, directory, *flags, **options)
    try:
        server.wait_ready()
        with server.client() as client:
            yield server, client
        if server.process.poll() is None:
            assert server.stop() == 0, server.stderr
    finally:
        server.kill()
