"""How many connections the server holds. Without a bound it runs out of file descriptors, and cannot even refuse."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import socket
import time
from typing import Any

from ..api_error import error_body

logger = logging.getLogger(__name__)

RESERVED_DESCRIPTORS = 64
"""For everything but connections."""

LEAST_CONNECTIONS = 16
BURST = 64
"""Connections refused in a row before the event loop gets its turn."""

LOG_EVERY_S = 60.0

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def connection_limit(wanted: int) -> int:
    """`wanted`, or fewer where this process may not open so many files. Raises the soft limit as far as it needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            limit = max(soft - RESERVED_DESCRIPTORS, LEAST_CONNECTIONS)
            logger.warning("only %d connections instead of %d: ulimit -n is %d", limit, wanted, soft)
            return limit
    return wanted


class BoundedListener(socket.socket):
    """A listening socket that answers one connection too many with 503 at once.

    Event loops call `accept` until it raises `BlockingIOError`. A connection counts until its socket is closed.
    """

    max_connections: int | None = None
    """None: no bound."""

    num_open = 0
    _logged_at = float("-inf")
    _spare: int | None = None
    """A descriptor to give up when there are no others: to accept and close is the only way to empty the queue."""

    def accept(self) -> tuple[socket.socket, Any]:
        for _ in range(BURST):
            if self._spare is None:
                self._spare = _open_spare()
            try:
                plain, address = super().accept()
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self._log("no file descriptor is left for a new connection: raise ulimit -n")
                if not self._drop_one():
                    break
                continue
            connection = _CountedSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
            connection.setblocking(False)
            if self.max_connections is None or self.num_open < self.max_connections:
                connection.listener = self
                self.num_open += 1
                return connection, address
            self._log(f"all {self.max_connections} connections are in use (--max-connections): new ones get 503")
            _refuse(connection, self.max_connections)
        raise BlockingIOError(errno.EAGAIN, "refused")

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _drop_one(self) -> bool:
        """Close a waiting connection unanswered."""
        if self._spare is None:
            return False
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            super().accept()[0].close()
            return True
        return False

    def _log(self, message: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("%s", message)


class _CountedSocket(socket.socket):
    listener: BoundedListener | None = None

    def close(self) -> None:
        super().close()
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.num_open -= 1


def _open_spare() -> int | None:
    with contextlib.suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _refuse(connection: socket.socket, limit: int) -> None:
    message = f"all {limit} connections of this server are in use: try again later"
    body = json.dumps(error_body(503, message)).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    with connection, contextlib.suppress(OSError):
        with contextlib.suppress(BlockingIOError):
            connection.recv(65536)  # what is unread when it is closed would reset the connection
        connection.send(head.encode() + body)
        connection.shutdown(socket.SHUT_WR)
