"""Tokens from the worker to the engine, in the shape of FastDeploy's `get_output`: one datagram per step.

    x[0]   1 running, -1 no row is left, -2 no message (receiver only)
    x[1]   number of rows
    x[2:]  the token of each row, see `batch_rows`
All int64. The engine makes the socket before it sends a task. The worker blocks while it is full.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...forks import closed_in_children
from . import run_directory

RUNNING = 1
ALL_STOPPED = -1
NO_MESSAGE = -2

RECEIVE_TIMEOUT_S = 0.2
"""Limit of a blocking read, which FastDeploy repeats."""

MAX_BYTES = 1 << 16


def channel_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"tokens{rank}"


class TokenSender:
    """The worker's end. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def send(self, rows: Sequence[int], *, running: bool) -> None:
        """Blocks while the socket is full. Raises `OSError` without an engine."""
        message = np.array([RUNNING if running else ALL_STOPPED, len(rows), *rows], dtype=np.int64)
        self._socket.sendto(message.tobytes(), self._path)


class TokenReceiver:
    """The engine's end, for one thread."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        closed_in_children(self._socket)
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))

    def receive(self, *, wait: bool) -> NDArray[np.int64] | None:
        """The next message, or None without one (with `wait` within `RECEIVE_TIMEOUT_S`)."""
        self._socket.settimeout(RECEIVE_TIMEOUT_S if wait else 0.0)
        try:
            return np.frombuffer(self._socket.recv(MAX_BYTES), dtype=np.int64)
        except (TimeoutError, BlockingIOError):
            return None


@cache
def _receiver(pid: int, rank: int) -> TokenReceiver:
    return TokenReceiver(channel_path(run_directory(), rank))


def get_output(tensor: Any, rank: int, wait: bool) -> None:
    """In place of FastDeploy's op: fill `tensor`, int64 `[rows + 2, 1]`."""
    message = _receiver(os.getpid(), rank).receive(wait=wait)
    values = np.full(tensor.shape, NO_MESSAGE, dtype=np.int64)
    if message is not None:
        values[: len(message), 0] = message
    tensor.set_value(values)


def unsupported_output(*args: Any, **kwargs: Any) -> None:
    """In place of FastDeploy's ops for unsupported outputs."""
    raise NotImplementedError("the CPU worker has no logprobs and no speculative decoding: leave them out")
