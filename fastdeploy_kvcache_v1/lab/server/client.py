"""Starts a server, sends requests to it or to FastDeploy's, and times the answers. For demo and benchmarks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import IO, Any

import httpx2

from ...errors import WorkerDiedError
from ..child_processes import end_process

REQUEST_TIMEOUT_S = 600.0


@dataclass
class Answer:
    """Of one streamed request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first_token_s: float = 0.0
    """From sending to the first token."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""


def complete(url: str, tokens: tuple[int, ...], max_tokens: int) -> Answer:
    """Exactly `max_tokens` tokens behind the prompt `tokens`, greedy. Raises `WorkerDiedError`, as `ask`."""
    body = {"prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    answer = ask(f"{url}/v1/completions", body)
    if len(answer.token_ids) != max_tokens:
        raise WorkerDiedError(f"the server answered {len(answer.token_ids)} tokens instead of {max_tokens}")
    return answer


def ask(url: str, body: dict[str, Any]) -> Answer:
    """The answer to `body`, streamed. Raises `WorkerDiedError` for a refusal, a broken stream or a silent server."""
    answer = Answer()
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    begin = perf_counter()
    try:
        with httpx2.stream("POST", url, json={**body, **more}, timeout=REQUEST_TIMEOUT_S) as response:
            if not response.is_success:
                text = response.read().decode(errors="replace")
                raise WorkerDiedError(f"the server answered HTTP {response.status_code}: {text[:200]}")
            for chunk in _chunks(response):
                _add_chunk(answer, chunk, perf_counter() - begin)
    except (httpx2.HTTPError, ValueError) as error:
        raise WorkerDiedError(f"the server did not answer: {type(error).__name__}: {error}") from error
    answer.total_s = perf_counter() - begin
    return answer


def _chunks(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """JSON objects of server-sent events. Raises `ValueError` for a broken one."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _add_chunk(answer: Answer, chunk: dict[str, Any], seconds: float) -> None:
    if "error" in chunk:
        raise WorkerDiedError(f"the server answered an error: {chunk['error']}")
    for choice in chunk.get("choices", ()):
        part = {**choice, **(choice.get("delta") or {})}  # a completion has no delta
        token_ids = part.get("completion_token_ids") or part.get("token_ids") or ()
        if token_ids and not answer.token_ids:
            answer.first_token_s = seconds
        answer.token_ids += token_ids
        answer.text += part.get("content") or part.get("text") or ""
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0

PROGRAM = (
    "import signal, sys; from fastdeploy_kvcache_v1 import cli; from fastdeploy_kvcache_v1.lab import child_processes; "
    "child_processes.die_with_parent_thread(signal.SIGTERM); sys.exit(cli.main())"
)
"""The command, which ends in order when its parent process is gone."""


@contextmanager
def running_server(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start a server on a free local port, yield its URL once it is healthy, and stop it at the end.

    It serves the random model unless `arguments` name another, and ends with the thread that entered the block.
    `environment` is added to this process's. Raises `WorkerDiedError` with its last lines if it fails to start.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", PROGRAM, "serve", "--model", "random", *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            _wait_until_healthy(process, url, log)
            yield url
        finally:
            end_process(process, STOP_TIMEOUT_S)


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx2.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    log.seek(0)
    last_lines = " | ".join(log.read().decode(errors="replace").strip().splitlines()[-5:])
    how = "did not become healthy" if process.returncode is None else f"ended with status {process.returncode}"
    raise WorkerDiedError(f"the server {how}: {last_lines}")
