"""The engine's end of the worker process: starts it, talks to it, notices its death, cleans up after it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zmq

from ...batch_request import BatchRequest
from ...errors import ConfigError, WorkerDiedError
from ...metadata import TransferReport
from ...model.step import StepResult
from ...storage.backends import make_link
from ...storage.engine.link import StorageLink
from ...storage.namespace import Namespace
from ...storage.settings import StorageSettings
from ...swap_message import SwapEncoder
from ...transfer.rank_messages import TransferNews
from .liveness import ProgressBoard, Watchdog, make_page
from .messages import BatchMessage, WorkerConnected, WorkerFailed, WorkerReady
from .transfers import TransferConfig

FirstMessage = TypeVar("FirstMessage", WorkerConnected, WorkerReady)

logger = logging.getLogger(__name__)

POLL_MS = 100
STOP_TIMEOUT_S = 2.0
MAX_PARENT_PATH = 107 - len("/fastdeploy-kvcache-12345678/storage-commands")
"""Unix socket names have at most 107 bytes."""


@dataclass(frozen=True)
class WorkerConfig:
    """Everything the worker process needs to know."""

    model_path: Path | None
    max_model_len: int
    block_size: int
    cache_dtype: str
    num_device_blocks: int
    num_host_blocks: int
    log_level: str
    layer_timeout_s: float = 30.0
    num_threads: int = 1
    storage: StorageSettings | None = None
    namespace: Namespace | None = None
    """Of its blocks, if there is storage."""
    model_family: str | None = None
    mtp: bool = False
    """Both of the random model."""
    transfer: TransferConfig | None = None
    """Of a server with a role."""
    copy_faults: str = ""
    """Test hook, see `copy_faults.py`."""


@dataclass(frozen=True)
class WorkerLaunch:
    """What the worker reads from its standard input."""

    config: WorkerConfig
    tasks_address: str
    results_address: str
    parent_pid: int
    progress_fd: int
    """Inherited; see `liveness.py`."""
    storage_addresses: tuple[str, str] = ("", "")
    """For commands and results of the storage agent, if there is storage."""


class StartInterruptedError(Exception):
    """The server was told to stop while its worker started; nothing is left of it."""


class ProcessWorkerClient:
    """A `WorkerClient` over one spawned worker process and two ZeroMQ sockets in a private directory.

    Construct and `close` on the main thread: the worker dies with the thread that started it.
    """

    def __init__(
        self, config: WorkerConfig, *, stop_requested: Callable[[], bool] = lambda: False, timeout_s: float = 0.0
    ) -> None:
        """Starts the worker and returns when it can take batches.

        A worker that makes no progress for `timeout_s` although there is something to do counts as dead, and is killed;
        0 sets no limit. Until it is ready, only `stop_requested` ends the wait.

        Raises `ConfigError` when it refuses its settings or model, `WorkerDiedError` when it ends for another reason,
        `StartInterruptedError` soon after `stop_requested` became true.
        """
        self._stop_requested = stop_requested
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._directory = _private_directory()
        self._context = zmq.Context()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._watchdog = Watchdog(timeout_s)
        self._board: ProgressBoard | None = None
        self._num_sent = self._num_answered = 0
        self._encoder = SwapEncoder()
        self._death = threading.Lock()
        """Held by the thread that reports the end."""
        self.storage: StorageLink | None = None
        """To the worker's storage agent, if there is storage."""
        self.ops: dict[str, str] = {}
        """Name of the implementation behind every copy op of the worker."""
        self.transfer_port: int | None = None
        """Where prefill servers reach a decode server's worker."""
        try:
            self._tasks = self._bind(zmq.PUSH, "tasks")
            self._results = self._bind(zmq.PULL, "results")
            if config.storage is not None:
                self.storage = self._bind_storage(config.storage)
            self._process = self._spawn(config)
            self._wait_until_connected(self._process)
            # The names have served: from here on not even a SIGKILL leaves files behind.
            self._remove_directory()
            ready = self._expect(self._process, WorkerReady)
            self.ops, self.transfer_port = ready.ops, ready.transfer_port
            self._is_ready = True
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def listen(
        self, on_message: Callable[[StepResult | TransferReport | TransferNews], None], on_death: Callable[[str], None]
    ) -> None:
        assert not self._threads, "listen once"
        for target, name, arguments in (
            (self._watch, "worker-watch", (on_death,)),
            (self._receive, "worker-results", (on_message, on_death)),
        ):
            thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def send(self, batch: BatchRequest) -> None:
        self._num_sent += 1
        self._send(BatchMessage.pack(batch, self._encoder))

    def close(self) -> None:
        self._closing.set()
        process, self._process = self._process, None
        if process is not None:
            self._stop(process)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))  # a process that not even SIGKILL ends must not keep us
        if self._board is not None:
            self._board.close()
            self._board = None
        if self.storage is not None:
            self.storage.close()
        self._context.destroy(linger=0)
        self._remove_directory()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        if self._is_ready:
            self._send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
                return
            logger.warning("worker process %d does not stop, killing it", process.pid)
        process.kill()  # while it starts it has nothing to finish, and reads no messages
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("worker process %d does not end even when killed, leaving it behind", process.pid)

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            socket.bind(self._address(name))
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot make a socket in {self._directory}: {error}") from None
        return socket

    def _bind_storage(self, settings: StorageSettings) -> StorageLink:
        try:
            return make_link(settings, [self._address("storage-commands")], self._address("storage-results"))
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot make a socket in {self._directory}: {error}") from None

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory / name}"

    def _spawn(self, config: WorkerConfig) -> subprocess.Popen[bytes]:
        package_root = str(Path(__file__).resolve().parents[3])
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        page = self._make_board()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.process"],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),  # the parent's standard output carries the ready line only
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which then stops the worker in order
                pass_fds=(page,),
            )
        finally:
            os.close(page)
        storage = (self._address("storage-commands"), self._address("storage-results"))
        launch = WorkerLaunch(config, self._address("tasks"), self._address("results"), os.getpid(), page, storage)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(pickle.dumps(launch))
        return process

    def _make_board(self) -> int:
        try:
            page = make_page(self._directory)
        except OSError as error:
            raise ConfigError(f"cannot write to {self._directory}: {error}") from None
        self._board = ProgressBoard(page)
        return page

    def _wait_until_connected(self, process: subprocess.Popen[bytes]) -> None:
        """Both sockets have a peer. The worker connects first and loads its model then."""
        self._expect(process, WorkerConnected)
        # Writable once the worker's end is connected. Why one has ended already is told by its next message, or none.
        while not self._tasks.poll(POLL_MS, zmq.POLLOUT) and process.poll() is None:
            self._require_wanted()
        while self.storage is not None and not self.storage.is_connected(POLL_MS) and process.poll() is None:
            self._require_wanted()

    def _expect(self, process: subprocess.Popen[bytes], kind: type[FirstMessage]) -> FirstMessage:
        while not self._results.poll(POLL_MS):
            self._require_wanted()
            if process.poll() is not None and not self._results.poll(POLL_MS):  # its last words count first
                raise WorkerDiedError(f"the worker process {_describe_exit(process.returncode)} while starting")
        message = pickle.loads(self._results.recv())
        if isinstance(message, WorkerFailed):
            raise (ConfigError if message.is_user_error else WorkerDiedError)(message.message)
        assert isinstance(message, kind), f"unexpected message {message!r} from a starting worker"
        return message

    def _require_wanted(self) -> None:
        if self._stop_requested():
            raise StartInterruptedError("stopped while the worker started")

    def _send(self, message: BatchMessage | None) -> None:
        # EAGAIN: the worker is not connected any more, and the watcher tells the engine.
        with contextlib.suppress(zmq.Again, zmq.ContextTerminated):
            self._tasks.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), zmq.NOBLOCK)

    def _watch(self, on_death: Callable[[str], None]) -> None:
        process = self._process
        if process is None:
            return
        status = process.wait()
        self._tell_death(f"the worker process {process.pid} {_describe_exit(status)}", on_death)

    def _tell_death(self, reason: str, on_death: Callable[[str], None]) -> None:
        if not self._closing.is_set() and self._death.acquire(blocking=False):
            logger.error("%s", reason)
            on_death(reason)

    def _receive(
        self, on_message: Callable[[StepResult | TransferReport | TransferNews], None], on_death: Callable[[str], None]
    ) -> None:
        process = self._process
        try:
            while not self._closing.is_set():
                if self._results.poll(POLL_MS):
                    message = pickle.loads(self._results.recv())
                    self._num_answered += isinstance(message, StepResult)
                    on_message(message)
                if process is not None and (stuck := self._stuck()):
                    self._tell_death(f"the worker process {process.pid} is stuck: {stuck}", on_death)
                    process.kill()
                    return
        except Exception:  # the edge of the thread: without answers every request would hang
            logger.exception("an answer of the worker cannot be read, killing it")
            if process is not None:
                process.kill()  # the watcher reports its end

    def _stuck(self) -> str | None:
        assert self._board is not None
        step = self._num_sent if self._num_sent > self._num_answered else None
        return self._watchdog.look(time.monotonic(), self._board.read(), step=step)


def _private_directory() -> Path:
    """A new directory with mode 0700 whose path is short enough for unix sockets. Raises `ConfigError`."""
    try:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_PARENT_PATH:
            parent = "/tmp"
        return Path(tempfile.mkdtemp(prefix="fastdeploy-kvcache-", dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot make a temporary directory: {error}: set TMPDIR to another place") from None


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
