"""Messages of the link itself, and which messages each end accepts.

rank -> engine   Hello first, then Memory, Gone, WorkerReport, and the messages of the rooms
engine -> rank   Welcome first, then Released, and the messages of the rooms
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from io import FileIO
from typing import Any

import msgspec

from .. import __version__
from ..contract.messages import WorkerReport


class Hello(msgspec.Struct, frozen=True):
    """First message of a rank."""

    version: str
    """See `MessageTypes.version`."""
    rank: int
    num_ranks: int
    pid: int
    word: str
    """Names the engine that this rank belongs to."""


class Welcome(msgspec.Struct, frozen=True):
    """First answer of the engine: the connection stands for the rest of the rank's life."""

    word: str


class Memory(msgspec.Struct, frozen=True):
    """The host tier of the rank has memory now. Brings a descriptor of that memory, which other processes can map."""

    generation: int
    """Counts from 0 in the life of the rank."""
    slots: int
    slot_bytes: int
    file: Any = None
    """At the receiver an `io.FileIO`, which the receiver closes. Forked children close it too."""


class Gone(msgspec.Struct, frozen=True):
    """The memory is about to go. The rank keeps it until `Released`, within a deadline."""

    generation: int


class Released(msgspec.Struct, frozen=True):
    """No other process maps the memory any more."""

    generation: int


class MessageTypes:
    """Types of the messages that each end accepts, by name. Nothing that arrives is unpickled."""

    def __init__(self, to_engine: Sequence[type] = (), to_rank: Sequence[type] = ()) -> None:
        self.to_engine = decoders_of((Hello, Memory, Gone, WorkerReport, *to_engine))
        self.to_rank = decoders_of((Welcome, Released, *to_rank))
        schemas = [decoder.type for table in (self.to_engine, self.to_rank) for decoder in table.values()]
        digest = blake2b(msgspec.json.encode(list(map(msgspec.json.schema, schemas))), digest_size=8).hexdigest()
        self.version = f"{__version__} {digest}"
        """Of the package, and a digest of the fields of all messages."""


Decoders = dict[str, msgspec.msgpack.Decoder[Any]]

_frame = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()


def decoders_of(types: Sequence[type]) -> Decoders:
    decoders: Decoders = {each.__name__: msgspec.msgpack.Decoder(each) for each in types}
    assert len(decoders) == len(types), f"two messages have one name: {types}"
    return decoders


def encode(message: object) -> bytes:
    return _encoder.encode((type(message).__name__, message))


def decode(decoders: Decoders, body: bytes) -> Any:
    """Raises `ValueError` for what is no message of these types."""
    try:
        name, payload = _frame.decode(body)
        if name not in decoders:
            raise ValueError(f"got a message {name[:40]!r}, expected one of {', '.join(decoders)}")
        return decoders[name].decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"got {len(body)} bytes that are no message: {error}") from None


def with_file(message: Memory, file: FileIO) -> Memory:
    return msgspec.structs.replace(message, file=file)
