"""Frames: one end of a stream socket, as whole messages: 4 bytes of length, then [name of the type, message]."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from struct import Struct
from typing import Any

import msgspec

__all__ = ["Frames"]

LENGTH = Struct("<I")
READ_BYTES = 1 << 18

_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


class Frames:
    """One thread reads, and one sends. Nothing that arrives is unpickled."""

    def __init__(self, connection: socket.socket, types: Sequence[type]) -> None:
        """`types`: of the messages that may arrive."""
        self.connection = connection
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
            each.__name__: msgspec.msgpack.Decoder(each, dec_hook=_made) for each in types
        }
        self._arrived = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Wait for room only if the socket blocks; `flush` sends the rest. Raises `OSError`."""
        body = msgspec.msgpack.encode((type(message).__name__, message), enc_hook=str)
        self._unsent += LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                del self._unsent[: self.connection.send(self._unsent)]
            except BlockingIOError:
                return

    def read(self) -> list[Any]:
        """Return the messages that are complete. Raises `EOFError` at the end."""
        try:
            data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        self._arrived += data
        messages, begin = [], 0
        while len(self._arrived) >= begin + LENGTH.size:
            (length,) = LENGTH.unpack_from(self._arrived, begin)
            end = begin + LENGTH.size + length
            if len(self._arrived) < end:
                break
            name, payload = _envelope.decode(bytes(self._arrived[begin + LENGTH.size : end]))
            messages.append(self._decoders[name].decode(payload))
            begin = end
        del self._arrived[:begin]
        return messages


def _made(kind: type, given: Any) -> Any:
    return kind(given)
