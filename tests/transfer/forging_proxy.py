"""A man in the middle of a data connection of `SocketPlane`."""

from __future__ import annotations

import contextlib
import socket

import xxhash

from fastdeploy_kvcache_v1.transfer.read_protocol import HEAD, TRAILER
from tests.fault_proxy import FaultProxy

HANDSHAKE_BYTES = (32, 32)
"""What a server says before its first answer: a nonce, and a proof once it knows the peer's."""


class ForgingProxy(FaultProxy):
    """Changes one bit of each answer and writes the checksum that fits. It knows no secret, and needs none."""

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        if source.getpeername() != self._target:
            super()._copy(source, target)
            return
        with contextlib.suppress(OSError, EOFError), source.makefile("rb") as answers:
            for count in HANDSHAKE_BYTES:
                target.sendall(_exactly(answers, count))
            while True:
                head = _exactly(answers, HEAD.size)
                blocks = bytearray(_exactly(answers, HEAD.unpack(head)[1]))
                is_open, _ = TRAILER.unpack(_exactly(answers, TRAILER.size))
                blocks[len(blocks) // 2] ^= 1
                self.faults_met += 1
                target.sendall(head + blocks + TRAILER.pack(is_open, xxhash.xxh3_64(bytes(blocks)).intdigest()))
        self._end(source, target)


def _exactly(stream, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data
