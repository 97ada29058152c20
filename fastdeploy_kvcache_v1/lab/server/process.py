"""A `fastdeploy-kvcache serve` of our own, for as long as a `with` block lasts: for the demo, benchmarks and tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import httpx

from ...errors import WorkerDiedError
from ..child_processes import end_process

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0

PROGRAM = (
    "import signal, sys; from fastdeploy_kvcache_v1 import cli; from fastdeploy_kvcache_v1.lab import child_processes; "
    "child_processes.die_with_parent_thread(signal.SIGTERM); sys.exit(cli.main())"
)
"""The command, which ends in order when the process that started it is gone, however that ended."""


@contextmanager
def running_server(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Starts a server on a free local port with `arguments`, yields its URL once it is healthy, stops it at the end.

    It serves the random model unless `arguments` name another. `environment` is added to this process's. It also ends
    with the thread that entered the block. Raises `WorkerDiedError` with the last lines of its output if it ends or
    stays silent before it is healthy.
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
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    log.seek(0)
    last_lines = " | ".join(log.read().decode(errors="replace").strip().splitlines()[-5:])
    how = "did not become healthy" if process.returncode is None else f"ended with status {process.returncode}"
    raise WorkerDiedError(f"the server {how}: {last_lines}")
