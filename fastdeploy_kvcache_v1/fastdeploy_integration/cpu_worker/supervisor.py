"""Starts FastDeploy's API server with the CPU worker, watches it, and ends it: nothing of it outlives this process."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from ...errors import ConfigError
from ...model.config import load_model_config
from ...switch import SWITCH
from ..engine.weight_updates import CLEARED as WEIGHTS_CLEARED
from .environment import LOG_DIRECTORY, RUN_DIRECTORY
from .failure_cause import failure_cause
from .janitor import SHARED_MEMORY, Estate
from .settings import Settings

logger = logging.getLogger(__name__)

PACKAGE = "fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker"
POLL_S = 0.2
HEALTH_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 5.0
SETTLED_S = 1.0
SETTLE_LIMIT_S = 20.0
UNHEALTHY_S = 60.0
"""The server is ended when every look at it for so long says that it is not healthy."""
GRACE_S = 10.0
"""How long the server may take to end by itself before it is killed."""
JANITOR_TIMEOUT_S = 60.0

EXIT_OK = 0
EXIT_FAILED = 1
MAX_SOCKET_PATH = 100
LOG_TAIL = 15


class Signalled(BaseException):
    """SIGINT or SIGTERM arrived."""


def supervise(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM: 0. Returns 1 when the server does not come up, dies, or stops answering.

    Main thread only. Raises `ConfigError` when the server's directories cannot be made, or the model not be split.
    """
    run_directory = _make_run_directory()
    settings.log_directory.mkdir(parents=True, exist_ok=True)
    estate = Estate(str(run_directory), settings.port, (settings.queue_port, settings.cache_queue_port))
    try:
        with _signals_raise(), _janitor(estate):
            return _serve(settings, run_directory)
    except Signalled:
        return EXIT_OK


def _serve(settings: Settings, run_directory: Path) -> int:
    model = _model(settings, run_directory)
    if settings.tensor_parallel_size > 1:
        load_model_config(Path(model)).shard(settings.tensor_parallel_size)  # the workers would say so after a minute
    output = settings.log_directory / "api_server.out"
    with output.open("wb") as file:
        server = subprocess.Popen(
            _command(settings, model),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(settings, run_directory),
            start_new_session=True,  # a Ctrl-C reaches us, and we tell it
        )
    try:
        reason = _wait_ready(settings, server)
        if reason is None:
            wait_settled(lambda: _num_processes(server))
            manager = "this package's cache manager" if settings.uses_our_manager else "FastDeploy's cache manager"
            print(f"FastDeploy on the CPU, with {manager}: {settings.url} (logs: {settings.log_directory})", flush=True)
            reason = _watch(settings, server)
    finally:
        with _signals_ignored():
            _end(server)
    if (cause := failure_cause(settings.log_directory)) is not None:
        reason = f"{reason}: {cause}"
    print(f"fastdeploy-kvcache: error: {reason}; the logs are in {settings.log_directory}", file=sys.stderr)
    print(_tail(output), file=sys.stderr)
    return EXIT_FAILED


def _command(settings: Settings, model: str) -> list[str]:
    return [
        sys.executable,
        "-u",
        "-m",
        f"{PACKAGE}.launch",
        "api",
        *("--model", model, "--host", settings.host, "--port", str(settings.port)),
        *("--engine-worker-queue-port", str(settings.queue_port)),
        *("--cache-queue-port", str(settings.cache_queue_port)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        *settings.passed_on,
    ]


def _environment(settings: Settings, run_directory: Path) -> dict[str, str]:
    return {
        # The zmq output path differs from production's, and the asynchronous engine starts its worker elsewhere.
        "FD_USE_GET_SAVE_OUTPUT_V1": "0",
        "FD_ENABLE_ASYNC_LLM": "0",
        **os.environ,
        SWITCH: "1" if settings.uses_our_manager else "0",
        RUN_DIRECTORY: str(run_directory),
        LOG_DIRECTORY: str(settings.log_directory),
        "TMPDIR": str(run_directory),
        "PROMETHEUS_MULTIPROC_DIR": str(_subdirectory(run_directory, "prometheus")),
    }


def _subdirectory(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir(exist_ok=True)
    return path


def _model(settings: Settings, run_directory: Path) -> str:
    if settings.model is not None:
        return settings.model
    from ...model.random_directory import write_random_directory

    return str(write_random_directory(run_directory / "random-model"))


def _wait_ready(settings: Settings, server: subprocess.Popen[bytes]) -> str | None:
    """None once it answers, else why it never will."""
    deadline = time.monotonic() + settings.start_timeout_s
    while not _is_healthy(settings):
        if server.poll() is not None:
            return f"FastDeploy's server ended during its start (status {server.returncode})"
        if time.monotonic() > deadline:
            return f"FastDeploy's server was not ready after {settings.start_timeout_s:g} s (--start-timeout)"
        time.sleep(POLL_S)
    return None


def wait_settled(count: Callable[[], int]) -> None:
    """Until `count`, of the server's processes, stops changing, within bounds.

    The first API process answers while the server is still forking the others. A request served in that moment could
    leave one of them with the lock of a log file that a thread of its parent held, and that worker hangs for ever.
    """
    deadline = time.monotonic() + SETTLE_LIMIT_S
    last, unchanged_since = count(), time.monotonic()
    while time.monotonic() < min(deadline, unchanged_since + SETTLED_S):
        time.sleep(POLL_S)
        if (now := count()) != last:
            last, unchanged_since = now, time.monotonic()


def _num_processes(server: subprocess.Popen[bytes]) -> int:
    try:
        return len(psutil.Process(server.pid).children(recursive=True))
    except psutil.Error:  # it has ended: whoever watches it says so
        return 0


def _watch(settings: Settings, server: subprocess.Popen[bytes]) -> str:
    """Returns why it has to be ended."""
    last_look = time.monotonic()
    illness = Illness()
    while server.poll() is None:
        time.sleep(POLL_S)
        if time.monotonic() - last_look < HEALTH_INTERVAL_S:
            continue
        is_well = _is_healthy(settings) or _are_weights_cleared(settings)
        last_look = time.monotonic()
        if illness.is_too_long(is_well, last_look):
            return f"FastDeploy's server has not been healthy for {UNHEALTHY_S:g} s"
    return f"FastDeploy's server ended (status {server.returncode})"


class Illness:
    """Since when every look at a server said that it is not healthy.

    Not how long ago it was seen healthy: after a pause of this process, or of the whole machine, it gets a second look.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def is_too_long(self, is_well: bool, now: float) -> bool:
        """With one more look, at `now` in seconds."""
        if is_well:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since > UNHEALTHY_S


def _is_healthy(settings: Settings) -> bool:
    connection = http.client.HTTPConnection(settings.host, settings.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _are_weights_cleared(settings: Settings) -> bool:
    """By FastDeploy's legacy API, which calls that unhealthy. It lasts until the weights are back."""
    try:
        status = (SHARED_MEMORY / f"model_weights_status.{settings.queue_port}").read_bytes()
    except OSError:
        return False
    return int.from_bytes(status[:4], sys.byteorder, signed=True) == WEIGHTS_CLEARED


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ask, then kill. The janitor ends the rest of its processes."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            server.kill()
    server.wait()


def _make_run_directory() -> Path:
    """Its path must leave room for unix sockets below it."""
    for parent in (None, "/tmp"):
        path = Path(tempfile.mkdtemp(prefix="fd-cpu-", dir=parent))
        if len(str(path)) <= MAX_SOCKET_PATH - len("/tokens0"):
            return path
        path.rmdir()
    raise ConfigError("the temporary directory's path is too long for unix sockets: set TMPDIR to a shorter one")


@contextmanager
def _janitor(estate: Estate) -> Iterator[None]:
    """Its clean-up has run when the context ends; it also runs when this process is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{PACKAGE}.janitor", estate.dumps()], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        with _signals_ignored():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(JANITOR_TIMEOUT_S)


@contextmanager
def _signals_raise() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Signalled

    with _handlers(handle):
        yield


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second signal must not tear the clean-up apart."""
    with _handlers(signal.SIG_IGN):
        yield


@contextmanager
def _handlers(handler: object) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handler) for number in numbers]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)


def _tail(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, LOG_TAIL)).rstrip()
