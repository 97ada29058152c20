"""Start FastDeploy's API server with the CPU worker, watch it, and end all its processes.

`python -m ...fastdeploy_cpu.supervisor FLAGS` serves until its standard input ends.
"""

from __future__ import annotations

import http.client
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ...contract.installation import needed_by
from ...errors import KVCacheError
from ...fastdeploy_integration.engine.weight_updates import CLEARED as WEIGHTS_CLEARED
from ...fastdeploy_integration.settings import LOG_DIRECTORY, RUN_DIRECTORY
from ...switch import SWITCH
from ..child_processes import end_process
from ..model.config import load_model_config
from . import SIGNALS
from .leftovers import SHARED_MEMORY, adopt_orphans, end_processes, living_processes, remove_files
from .settings import Settings, parse

POLL_S = 0.2
HEALTH_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 5.0
SETTLED_S = 1.0
SETTLE_LIMIT_S = 20.0
UNHEALTHY_S = 60.0
"""The server is ended after failing all health checks for this time."""
GRACE_S = 10.0
"""Time for the server to end by itself before it is killed."""

EXIT_OK, EXIT_FAILED, EXIT_WRONG_SETTING = range(3)
PROMETHEUS = "prometheus"
OUTPUT = "api_server.out"
LOGS = ("launch_worker.log", "workerlog.0", OUTPUT)
"""Files that may say why the server ended: its exit status is 0 even then."""
LOG_TAIL = 15
TRACKER = "resource_tracker"
"""Part of Python's lines about a killed rank, which are left out."""


class CommandEnded(Exception):
    """Standard input has ended."""


def main() -> int:
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # for the command; SIG_IGN would be inherited by children
    try:
        with needed_by("serve --fastdeploy-cpu", "embedded"):
            return supervise(parse(sys.argv[1:]))
    except KVCacheError as error:
        print(f"fastdeploy-kvcache: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_WRONG_SETTING


def supervise(settings: Settings) -> int:
    """Serve until standard input ends: returns 0. Returns 1 if the server does not start, dies, or stops answering.

    Raises `ConfigError` if the model cannot be split among the ranks.
    """
    adopt_orphans()
    run_directory = Path(tempfile.mkdtemp(prefix="fd-cpu-"))
    settings.log_directory.mkdir(parents=True, exist_ok=True)
    try:
        return _serve(settings, run_directory)
    except CommandEnded:
        return EXIT_OK
    finally:
        end_processes()
        remove_files(run_directory, settings.ports, (*settings.queue_ports, *settings.cache_queue_ports))


def pause(seconds: float) -> None:
    """Raises `CommandEnded`."""
    if select.select([sys.stdin], [], [], seconds)[0]:
        raise CommandEnded


def _serve(settings: Settings, run_directory: Path) -> int:
    from ..model.directory import write_random_directory

    model = settings.model or str(write_random_directory(run_directory / "random-model"))
    if settings.tensor_parallel_size > 1:
        load_model_config(Path(model)).shard(settings.tensor_parallel_size)  # workers would fail after a minute
    (run_directory / PROMETHEUS).mkdir()
    with (settings.log_directory / OUTPUT).open("wb") as file:
        server = subprocess.Popen(
            _command(settings, model),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(settings, run_directory),
            start_new_session=True,  # its signals to its group must not reach this process
        )
    try:
        reason = _wait_ready(settings, server)
        if reason is None:
            wait_settled(lambda: len(living_processes()))
            manager = "this package's cache manager" if settings.uses_our_manager else "FastDeploy's cache manager"
            urls, logs = " ".join(settings.urls), f"(logs: {settings.log_directory})"
            print(f"Ready: {urls} runs FastDeploy on the CPU, with {manager} {logs}", flush=True)
            reason = _watch(settings, server)
    finally:
        end_process(server, GRACE_S)
    print(f"fastdeploy-kvcache: error: {reason}; the logs are in {settings.log_directory}", file=sys.stderr)
    for path in (settings.log_directory / name for name in LOGS):
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                lines = (line.rstrip() for line in file if TRACKER not in line)
                print(f"--- {path.name}", *deque(lines, LOG_TAIL), sep="\n", file=sys.stderr)
    return EXIT_FAILED


def _command(settings: Settings, model: str) -> list[str]:
    ports, size = ",".join(map(str, settings.ports)), len(settings.ports)
    one = ("api",)
    several = ("servers", "--num-servers", str(size), "--ports", ports, "--args", "--data-parallel-size", str(size))
    return [
        sys.executable,
        "-u",
        "-m",
        f"{__package__}.launch",
        *(one if size == 1 else several),
        *("--model", model, "--host", settings.host),
        *(("--port", ports) if size == 1 else ()),
        *("--engine-worker-queue-port", ",".join(map(str, settings.queue_ports))),
        *("--cache-queue-port", ",".join(map(str, settings.cache_queue_ports))),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        *settings.passed_on,
    ]


def _environment(settings: Settings, run_directory: Path) -> dict[str, str]:
    return {
        # The zmq output path differs from production, and the asynchronous engine starts its worker elsewhere.
        "FD_USE_GET_SAVE_OUTPUT_V1": "0",
        "FD_ENABLE_ASYNC_LLM": "0",
        **os.environ,
        SWITCH: "1" if settings.uses_our_manager else "0",
        RUN_DIRECTORY: str(run_directory),
        LOG_DIRECTORY: str(settings.log_directory),
        "TMPDIR": str(run_directory),
        "PROMETHEUS_MULTIPROC_DIR": str(run_directory / PROMETHEUS),
    }


def _wait_ready(settings: Settings, server: subprocess.Popen[bytes]) -> str | None:
    """Returns None once the server answers, or the reason why it will not."""
    deadline = time.monotonic() + settings.start_timeout_s
    while not _is_healthy(settings):
        if server.poll() is not None:
            return f"FastDeploy's server ended during its start (status {server.returncode})"
        if time.monotonic() > deadline:
            return f"FastDeploy's server was not ready after {settings.start_timeout_s:g} s (--start-timeout)"
        pause(POLL_S)
    return None


def wait_settled(count: Callable[[], int]) -> None:
    """Wait, within a limit, until `count` of the server's processes stops changing.

    The first API process answers while the server is still forking others.
    """
    deadline = time.monotonic() + SETTLE_LIMIT_S
    last, unchanged_since = count(), time.monotonic()
    while time.monotonic() < min(deadline, unchanged_since + SETTLED_S):
        pause(POLL_S)
        if (now := count()) != last:
            last, unchanged_since = now, time.monotonic()


def _watch(settings: Settings, server: subprocess.Popen[bytes]) -> str:
    """Returns the reason why the server must be ended. It counts checks, not time, for the machine may pause."""
    last_look, sick_looks = time.monotonic(), 0
    while server.poll() is None:
        pause(POLL_S)
        if time.monotonic() - last_look < HEALTH_INTERVAL_S:
            continue
        last_look = time.monotonic()
        sick_looks = 0 if _is_well(settings) else sick_looks + 1
        if sick_looks * HEALTH_INTERVAL_S > UNHEALTHY_S:
            return f"FastDeploy's server has not been healthy for {UNHEALTHY_S:g} s"
    return f"FastDeploy's server ended (status {server.returncode})"


def _is_healthy(settings: Settings) -> bool:
    return all(_answers(settings.host, port) for port in settings.ports)


def _is_well(settings: Settings) -> bool:
    """FastDeploy's legacy API clears the weights of an engine, which counts as unhealthy until they are back."""
    engines = zip(settings.ports, settings.queue_ports, strict=True)
    return all(_answers(settings.host, port) or _are_weights_cleared(queue_port) for port, queue_port in engines)


def _answers(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _are_weights_cleared(queue_port: int) -> bool:
    try:
        status = (SHARED_MEMORY / f"model_weights_status.{queue_port}").read_bytes()
    except OSError:
        return False
    return int.from_bytes(status[:4], sys.byteorder, signed=True) == WEIGHTS_CLEARED


if __name__ == "__main__":
    sys.exit(main())
