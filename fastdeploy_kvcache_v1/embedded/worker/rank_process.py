"""RankProcess: one worker process, its two sockets, and the thread that listens to it and watches it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq

from ...batch_request import BatchRequest
from ...errors import ConfigError, WorkerDiedError
from ...metadata import TransferReport
from ...model.step import StepResult
from ...transfer.rank_messages import TransferNews
from .liveness import Progress, Watchdog
from .messages import WorkerConnected, WorkerFailed, WorkerLaunch, WorkerReady

__all__ = ["POLL_MS", "STOP_TIMEOUT_S", "Answer", "RankProcess"]

Answer = StepResult | TransferReport | TransferNews

FirstMessage = TypeVar("FirstMessage", WorkerConnected, WorkerReady)

logger = logging.getLogger(__name__)

POLL_MS = 100
STOP_TIMEOUT_S = 2.0


class RankProcess:
    """Started by its constructor; then `wait_connected`, `wait_ready`, `listen`, and in the end `close`.

    Main thread, but for `send`: the process dies with the thread that started it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        launch: WorkerLaunch,
        *,
        on_poll: Callable[[], None],
    ) -> None:
        """`on_poll` is called again and again while a start is waited for; what it raises ends the wait. Raises
        `ConfigError` when the directory of `launch` cannot be used.
        """
        self._launch = launch
        self._on_poll = on_poll
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_ready = False
        self._watchdog = Watchdog(launch.config.worker_timeout)
        self._num_sent = self._num_answered = 0
        self._progress = Progress()
        self._tasks = _bind(context, zmq.PUSH, launch.tasks_address)
        self._results = _bind(context, zmq.PULL, launch.results_address)
        self._process: subprocess.Popen[bytes] | None = _spawn(launch)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def wait_connected(self) -> None:
        """Both sockets have a peer. The worker connects first and loads its model then. Raises as `wait_ready`."""
        self._expect(WorkerConnected)
        while not self._tasks.poll(POLL_MS, zmq.POLLOUT):
            self._on_poll()

    def wait_ready(self) -> WorkerReady:
        """Raises as `require_running`."""
        message = self._expect(WorkerReady)
        self._is_ready = True
        return message

    def require_running(self) -> None:
        """Raises `ConfigError` when it refused its settings or model, `WorkerDiedError` when it ended otherwise."""
        assert self._process is not None
        if self._process.poll() is None:
            return
        while self._results.poll(POLL_MS):  # its last words count first
            _raise_failure(pickle.loads(self._results.recv()))
        raise WorkerDiedError(f"{self._name} {_describe_exit(self._process.returncode)} while starting")

    def listen(self, on_message: Callable[[Answer], None], on_death: Callable[[str], None]) -> None:
        """As `ProcessWorkerClient.listen`, for this rank."""
        assert self._thread is None, "listen once"
        name = f"worker{self._launch.rank}"
        self._thread = threading.Thread(target=self._listen, args=(on_message, on_death), name=name, daemon=True)
        self._thread.start()

    def send(self, batch: BatchRequest) -> None:
        self._num_sent += 1
        self._send(batch)

    def request_stop(self) -> None:
        """It ends once it has answered what it was sent, and what is told of its end is expected."""
        self._closing.set()
        if self._process is None:
            return
        if self._is_ready:
            self._send(None)
        else:
            self._process.kill()  # while it starts it has nothing to finish, and reads no messages

    def close(self, deadline: float) -> None:
        """After `request_stop`: the process has ended, and the thread. It is killed at `deadline`, in seconds of
        `time.monotonic`. Idempotent.
        """
        process, self._process = self._process, None
        if process is not None:
            _wait_or_kill(process, deadline)
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)  # a process that not even SIGKILL ends must not keep us

    def _expect(self, kind: type[FirstMessage]) -> FirstMessage:
        message: object = None
        while message is None or isinstance(message, Progress):
            if self._results.poll(POLL_MS):
                message = pickle.loads(self._results.recv())
            else:
                self._on_poll()
        _raise_failure(message)
        assert isinstance(message, kind), f"unexpected message {message!r} from a starting worker"
        return message

    @property
    def _name(self) -> str:
        is_alone = self._launch.config.tensor_parallel_size == 1
        return "the worker process" if is_alone else f"the worker process of rank {self._launch.rank}"

    def _send(self, message: BatchRequest | None) -> None:
        # EAGAIN: the worker is not connected any more, and the watcher tells the engine.
        with contextlib.suppress(zmq.Again, zmq.ContextTerminated):
            self._tasks.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), zmq.NOBLOCK)

    def _listen(self, on_message: Callable[[Answer], None], on_death: Callable[[str], None]) -> None:
        process = self._process
        if process is None:
            return
        reason = ""
        try:
            while not self._closing.is_set() and not reason:
                if self._results.poll(POLL_MS):
                    self._take(pickle.loads(self._results.recv()), on_message)
                elif process.poll() is not None:
                    reason = _describe_exit(process.returncode)
                if not reason and (stuck := self._stuck()):
                    reason = f"is stuck: {stuck}"
                    process.kill()
        except Exception:  # the edge of the thread: without answers every request would hang
            logger.exception("an answer of the worker cannot be read, killing it")
            process.kill()
            reason = _describe_exit(process.wait())
        if reason and not self._closing.is_set():
            on_death(f"{self._name} {process.pid} {reason}")

    def _take(self, message: Answer | Progress, on_message: Callable[[Answer], None]) -> None:
        if isinstance(message, Progress):
            self._progress = message
        else:
            self._num_answered += isinstance(message, StepResult)
            on_message(message)

    def _stuck(self) -> str | None:
        step = self._num_sent if self._num_sent > self._num_answered else None
        return self._watchdog.look(time.monotonic(), self._progress, step=step)


def _raise_failure(message: object) -> None:
    if isinstance(message, WorkerFailed):
        raise (ConfigError if message.is_user_error else WorkerDiedError)(message.message)


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        directory = Path(address.removeprefix("ipc://")).parent
        raise ConfigError(f"cannot make a socket in {directory}: {error}") from None
    return socket


def _spawn(launch: WorkerLaunch) -> subprocess.Popen[bytes]:
    package_root = str(Path(__file__).resolve().parents[3])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.process"],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),  # the parent's standard output carries the ready line only
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, which then stops the worker in order
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(pickle.dumps(launch))
    return process


def _wait_or_kill(process: subprocess.Popen[bytes], deadline: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(deadline - time.monotonic(), 0))
        return
    logger.warning("worker process %d does not stop, killing it", process.pid)
    process.kill()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.error("worker process %d does not end even when killed, leaving it behind", process.pid)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
