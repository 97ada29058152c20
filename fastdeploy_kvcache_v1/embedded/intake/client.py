"""The server's end of the intake process: starts it, asks it, ends it when it takes too long, starts another."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ...errors import ModelError
from ...units import GIB, MIB
from ..api_error import ApiError
from .intake import Endpoint, IntakeConfig, Reading
from .process import (
    ERROR,
    READING,
    READY,
    REFUSED,
    Frame,
    Launch,
    cpu_seconds,
    memory_bytes,
    receive,
    send,
    unpack_error,
    unpack_reading,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0

BASE_WALL_S = 10.0
WALL_PER_CPU = 4
"""Seconds that a CPU second may take on a busy machine. The limit that counts is the one of CPU time; this one is for a
process that does nothing at all.
"""

MAX_WAITING = 64
"""Requests that wait for the process."""

MAX_WAIT_S = 20.0
"""A request that has waited longer is refused: its client has given up, or soon will."""

MAX_REPLY = 64 * MIB
STOP_TIMEOUT_S = 1.0


class BodyReader(Protocol):
    async def read(self, endpoint: Endpoint, raw: bytes | bytearray) -> Reading:
        """Raises `ApiError`."""


class IntakeClient:
    """A `BodyReader` over one process, which reads one body at a time.

    One thread owns process and socket. That keeps bodies in order, and the process dies with the thread that started
    it. A process that was ended is replaced at once, so that the next body does not wait for it.
    """

    def __init__(self, config: IntakeConfig) -> None:
        """Starts the process; `wait_ready` tells how that went."""
        self._config = config
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._waiting = 0
        self._is_closing = False
        self._started: Future[None] = self._executor.submit(self._start)

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def has_failed(self) -> bool:
        """`wait_ready` raises."""
        return self._started.done() and self._started.exception() is not None

    def wait_ready(self) -> None:
        """Raises `ModelError` when the tokenizer or the chat template cannot be used."""
        self._started.result()

    async def read(self, endpoint: Endpoint, raw: bytes | bytearray) -> Reading:
        """Event loop only. Raises `ApiError`, also for a body that takes more than its limits."""
        if self._waiting >= MAX_WAITING:
            raise _busy()
        self._waiting += 1
        try:
            job = functools.partial(self._exchange, endpoint, raw, time.monotonic())
            return await asyncio.get_running_loop().run_in_executor(self._executor, job)
        except RuntimeError as error:
            raise ApiError(503, "the server is shutting down") from error
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the process, whatever it does. Idempotent."""
        self._is_closing = True
        process = self._process
        if process is not None:
            process.kill()
        self._executor.shutdown(cancel_futures=True)
        self._discard()

    def _exchange(self, endpoint: Endpoint, raw: bytes | bytearray, asked_at: float) -> Reading:
        if time.monotonic() - asked_at > MAX_WAIT_S:
            raise _busy()
        try:
            self._start()
        except ModelError as error:  # it could be read when the server started
            raise ApiError(503, str(error)) from error
        try:
            return self._ask_again_if_unread(endpoint, raw)
        except (OSError, EOFError, ValueError) as error:
            if self._is_closing:
                raise ApiError(503, "the server is shutting down") from error
            reason = self._end(error, cpu_seconds(len(raw)))
            logger.warning("a request was refused and the intake process started again: %s", reason)
            self._executor.submit(self._start)
            message = f"{endpoint.param}: this request cannot be read: {reason}"
            raise ApiError(400, message, endpoint.param) from error

    def _ask_again_if_unread(self, endpoint: Endpoint, raw: bytes | bytearray) -> Reading:
        """A process that ends between two requests still looks alive for a moment. It leaves the body unread, which
        resets the connection: not the request's fault, so another process reads it; but only once.
        """
        try:
            return self._ask(endpoint, raw)
        except ConnectionError as error:
            if self._is_closing:
                raise
            logger.warning("the intake process has ended before it read a request, starting it again: %s", error)
            self._discard()
            self._start()
            return self._ask(endpoint, raw)

    def _ask(self, endpoint: Endpoint, raw: bytes | bytearray) -> Reading:
        connection = self._connection
        if connection is None:
            raise EOFError("not started: the server is closing")
        deadline = time.monotonic() + BASE_WALL_S + WALL_PER_CPU * cpu_seconds(len(raw))
        connection.settimeout(deadline - time.monotonic())
        send(connection, Frame(0, endpoint.value.encode(), raw))
        reply = receive(connection, deadline=deadline, most=MAX_REPLY)
        if reply.kind == ERROR:
            raise unpack_error(reply)
        if reply.kind != READING:
            raise ValueError(f"the intake process sent an unexpected reply of kind {reply.kind}")
        return unpack_reading(reply)

    def _start(self) -> None:
        """Unless it runs. Raises `ModelError`."""
        if self._process is not None and self._process.poll() is not None:
            logger.warning("the intake process has ended (status %s), starting it again", self._process.returncode)
            self._discard()
        if self._process is not None or self._is_closing:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = ours
            self._process = _spawn(theirs.fileno())
        if self._is_closing:
            self._process.kill()  # `close` may not have seen it
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            send(ours, Frame(0, pickle.dumps(Launch(self._config, os.getpid())), b""))
            reply = receive(ours, deadline=deadline, most=MAX_REPLY)
        except (OSError, EOFError, ValueError) as error:
            if self._is_closing:
                return
            raise ModelError(f"the model cannot be used: {self._end(error, 0.0)}") from error
        if reply.kind == REFUSED:
            self._discard()
            raise ModelError(" ".join(reply.head.decode("utf-8", "replace").split()))
        assert reply.kind == READY, f"unexpected frame of kind {reply.kind} from a starting intake process"

    def _end(self, error: Exception, cpu_s: float) -> str:
        """Kill the process; the reason, one line, why it had to be, or why it ended itself."""
        process = self._process
        assert process is not None, "it was asked"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if isinstance(error, TimeoutError) else STOP_TIMEOUT_S)
        status = process.poll()
        self._discard()
        if status is None:
            return "the intake process does not answer"
        if status == -signal.SIGPROF:
            return f"chat template and tokenizer take more than {cpu_s:.3g} s of CPU time"
        gib = memory_bytes(self._config) / GIB
        return f"chat template and tokenizer fail, or need more than {gib:g} GiB of memory (status {status})"

    def _discard(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    package_root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.process", str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),  # the parent's standard output carries the ready line only
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the parent
        pass_fds=(fd,),
    )


def _busy() -> ApiError:
    return ApiError(503, "too many requests wait to be read: try again later")
