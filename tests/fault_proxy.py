"""A TCP proxy that misbehaves on demand: slow, hanging, resetting, changing bytes, and well again."""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time

CHUNK = 1 << 16
LARGE = 1 << 12
"""A piece of so many bytes is not only a header."""

POLL_S = 0.02


class Fault(enum.Enum):
    NONE = enum.auto()
    SLOW = enum.auto()
    """Each piece comes 50 ms late."""
    HANG = enum.auto()
    """Nothing passes, and nothing is closed."""
    RESET = enum.auto()
    """Each connection is reset as soon as it says something."""
    FLIP = enum.auto()
    """One bit of each large piece is another one."""


class FaultProxy:
    """In front of a port of the loopback interface. `fault` may be changed at any time."""

    def __init__(self, port: int, listen_at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.fault = Fault.NONE
        self.faults_met = 0
        """Pieces that were late, held back, changed, or answered with a reset."""
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(listen_at)
        self._is_closed = False
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._is_closed = True
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self._sockets |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if self.fault is Fault.FLIP:
                    data = _flipped(data)
                self.faults_met += self.fault is not Fault.NONE
                if self.fault is Fault.SLOW:
                    time.sleep(0.05)
                while self.fault is Fault.HANG and not self._is_closed:
                    time.sleep(POLL_S)
                if self.fault is Fault.RESET:
                    for each in (source, target):
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                target.sendall(data)
        self._end(source, target)

    def _end(self, source: socket.socket, target: socket.socket) -> None:
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._sockets.discard(each)


def _flipped(data: bytes) -> bytes:
    if len(data) < LARGE:
        return data
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)
