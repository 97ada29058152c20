"""A worker process, the pipe to it, and the thread that reads its answers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ....contract.messages import BatchRequest, WorkerReport
from ....errors import KVCacheError, WorkerDiedError
from ....transfer.rank_messages import TransferNews
from ...model.step import LayerComputed, StepResult
from .messages import WorkerLaunch, WorkerReady

__all__ = ["POLL_S", "STOP_TIMEOUT_S", "Answer", "RankProcess"]

Answer = StepResult | LayerComputed | WorkerReport | TransferNews

logger = logging.getLogger(__name__)

POLL_S = 0.1
STOP_TIMEOUT_S = 2.0


class RankProcess:
    """Construct, `wait_ready`, `listen`, `close`: on the main thread, because the process dies with the thread that
    started it. `send` from any thread.
    """

    def __init__(self, launch: WorkerLaunch, peers: Sequence[Connection] = (), *, on_poll: Callable[[], None]) -> None:
        """`peers`: its pipes to other ranks, which this process closes. `on_poll` is called repeatedly during the wait
        for a start; its exception ends the wait.
        """
        self._rank = launch.rank
        is_alone = launch.config.tensor_parallel_size == 1
        self._name = "the worker process" if is_alone else f"the worker process of rank {launch.rank}"
        self._on_poll = on_poll
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_ready = False
        self._link, theirs = Pipe()
        with ExitStack() as ends:
            self._process = _spawn([ends.enter_context(each) for each in (theirs, *peers)])
        self._send(launch)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> WorkerReady:
        """Raises as `require_running`."""
        while not self._link.poll(POLL_S):
            self._on_poll()
        message = self._first_message()
        assert isinstance(message, WorkerReady), f"unexpected message {message!r} from a starting worker"
        self._is_ready = True
        return message

    def require_running(self) -> None:
        """Raises the `KVCacheError` that prevented its start, `WorkerDiedError` when it ended without one."""
        if not self._is_ready and self._process.poll() is not None:
            self._first_message()

    def listen(self, on_message: Callable[[Answer], None], on_death: Callable[[str], None]) -> None:
        """Like `ProcessWorkerClient.listen`, for this rank."""
        assert self._thread is None, "listen once"
        arguments = (on_message, on_death)
        self._thread = threading.Thread(target=self._listen, args=arguments, name=f"worker{self._rank}", daemon=True)
        self._thread.start()

    def send(self, batch: BatchRequest) -> None:
        self._send(batch)

    def request_stop(self) -> None:
        """Let it drop its batch and end. Its end is expected."""
        self._closing.set()
        if self._is_ready:
            self._send(None)
            self._process.send_signal(signal.SIGUSR1)
        else:
            self._process.kill()  # while it starts, it reads no messages

    def close(self, deadline: float) -> None:
        """After `request_stop`: the process has ended, and the thread. It is killed at `deadline`, in seconds of
        `time.monotonic`. Idempotent.
        """
        _wait_or_kill(self._process, deadline)
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)  # not forever: SIGKILL does not end a process in the kernel
        self._link.close()

    def _first_message(self) -> Any:
        try:
            message = self._link.recv()
        except (EOFError, OSError):
            raise WorkerDiedError(f"{self._name} {_describe_exit(self._process.wait())} while starting") from None
        if isinstance(message, KVCacheError):
            raise message
        return message

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, or this end is closed: `_listen` reports it
            self._link.send(message)

    def _listen(self, on_message: Callable[[Answer], None], on_death: Callable[[str], None]) -> None:
        try:
            while True:
                on_message(self._link.recv())
        except (EOFError, OSError):
            pass  # it has ended
        except Exception:  # the edge of the thread: without answers every request would hang
            logger.exception("an answer of the worker cannot be read, killing it")
            self._process.kill()
        if self._closing.is_set():
            return  # the process ends later than its pipe: `close` waits for it
        status = _wait_or_kill(self._process, time.monotonic() + STOP_TIMEOUT_S)
        on_death(f"{self._name} {self.pid} {_describe_exit(status)}")


def _spawn(pipes: Sequence[Connection]) -> subprocess.Popen[bytes]:
    package_root = str(Path(__file__).resolve().parents[4])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    descriptors = [each.fileno() for each in pipes]
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.process", *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),  # the parent's standard output carries the ready line only
        pass_fds=descriptors,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, which then stops the worker in order
    )


def _wait_or_kill(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(max(deadline - time.monotonic(), 0))
    logger.warning("worker process %d did not end in time: killing it", process.pid)
    process.kill()
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.error("worker process %d does not end even when killed, leaving it behind", process.pid)
        return -signal.SIGKILL


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
