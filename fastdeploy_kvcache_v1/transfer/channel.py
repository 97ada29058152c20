"""Channel: a TCP connection with deadlines, bounded frames, and scatter-gather without copies."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence

from ..errors import ConfigError, PeerRefusedError

__all__ = ["MAX_FRAME_BYTES", "Channel", "connect", "listen"]

MAX_FRAME_BYTES = 1 << 20
"""Of a message. A peer that announces more is refused before a byte of it is read."""

_LENGTH = struct.Struct("<I")
_VIEWS = 64
"""Buffers per system call. The kernel takes about a MiB at once, whatever it is offered."""

_LONGEST_WAIT_S = 60.0


class Channel:
    """One thread sends and one receives at a time. Both raise `TimeoutError` after `deadline` (`time.monotonic`),
    `EOFError` when the peer has closed, else `OSError`; the connection is of no use afterwards.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone sends no end
        self._socket = connection

    @property
    def peer(self) -> str:
        """`host:port`, for messages; `a closed connection` where there is none."""
        try:
            host, port = self._socket.getpeername()[:2]
        except OSError:
            return "a closed connection"
        return f"{host}:{port}"

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """All of `buffers`, one behind the other."""
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        while first < len(views):
            try:
                sent = self._socket.sendmsg(views[first : first + _VIEWS])
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
                continue
            first = _advance(views, first, sent)

    def receive(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """Fill all of `buffers`, one behind the other. After it raised, none of them is written any more."""
        views = [buffer for buffer in buffers if len(buffer)]
        first = 0
        while first < len(views):
            try:
                received = self._socket.recvmsg_into(views[first : first + _VIEWS])[0]
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if received == 0:
                raise EOFError("the peer closed the connection")
            first = _advance(views, first, received)

    def receive_bytes(self, count: int, deadline: float) -> bytearray:
        """The next `count` bytes."""
        buffer = bytearray(count)
        self.receive([memoryview(buffer)], deadline)
        return buffer

    def send_frame(self, frame: bytes, deadline: float) -> None:
        """A message of `MAX_FRAME_BYTES` at most."""
        assert len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame)} bytes is too large to be sent"
        self.send([_LENGTH.pack(len(frame)), frame], deadline)

    def receive_frame(self, deadline: float, most: int = MAX_FRAME_BYTES) -> bytearray:
        """The next message. Raises `PeerRefusedError` for one of more than `most` bytes."""
        (count,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size, deadline))
        if count > most:
            raise PeerRefusedError(f"{self.peer} announces a message of {count} bytes, {most} are allowed")
        return self.receive_bytes(count, deadline)

    def shut_down(self) -> None:
        """Any thread: whoever sends or receives is woken, and fails. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only when no other thread uses the channel. Idempotent."""
        self.shut_down()
        self._socket.close()

    def _wait(self, event: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer did not answer in time")
        poller = select.poll()
        poller.register(self._socket, event)
        poller.poll(min(left, _LONGEST_WAIT_S) * 1000 + 1)


def _advance(views: list[memoryview], first: int, count: int) -> int:
    """Where the next byte goes after `count` more: views before it are done, and its own is trimmed."""
    while first < len(views) and count >= len(views[first]):
        count -= len(views[first])
        first += 1
    if count:
        views[first] = views[first][count:]
    return first


def listen(host: str, port: int) -> socket.socket:
    """Listens on that address and on no other; port 0 for a free one. Raises `ConfigError`."""
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"{host!r} stands for every address of this machine: give the one under which the peers reach it"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def connect(host: str, port: int, deadline: float) -> Channel:
    """Raises `OSError`, `TimeoutError` among them."""
    left = max(0.001, deadline - time.monotonic())
    return Channel(socket.create_connection((host, port), timeout=left))
