"""What prefill (P) and decode (D) workers say to each other on their control link: checked as it is read."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..errors import CacheStateError, PeerRefusedError
from .channel import MAX_FRAME_BYTES
from .geometry import Geometry

__all__ = [
    "Done",
    "Hello",
    "Message",
    "Offer",
    "Ping",
    "Progress",
    "Refused",
    "Settled",
    "Welcome",
    "Withdraw",
    "decode",
    "encode",
    "require_sendable",
]

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
LeaseName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Hello(_Message):
    """P's first message."""

    geometry: Geometry
    address: bytes
    """Of P's data plane."""
    instance: Name


class Welcome(_Message):
    """D's answer: the caches fit."""

    geometry: Geometry
    instance: Name


class Refused(_Message):
    """D's other answer. It closes then."""

    reason: Text


class Offer(_Message):
    """P: these blocks of a request will be readable until the lease ends."""

    lease: LeaseName
    request_id: Name
    slots: list[Count]
    """P's, in prompt order."""
    num_tokens: Count


class Progress(_Message):
    """P: blocks before `end_block` can be read, in layers before `end_layer`, and those of earlier chunks in all."""

    lease: LeaseName
    end_block: Count
    end_layer: Count


class Withdraw(_Message):
    """P: the lease has ended."""

    lease: LeaseName
    reason: Text


class Done(_Message):
    """D: every byte has arrived, or none is wanted any more. The lease ends with it."""

    lease: LeaseName
    error: Text | None = None
    first_block: Count = 0
    """Of the offer; those before were not read."""
    num_blocks: Count = 0
    digest: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Over all that was read, where D checks."""


class Settled(_Message):
    """P's answer to a `Done` without an error: None when the lease was open until then and the digest is right."""

    lease: LeaseName
    error: Text | None = None


class Ping(_Message):
    """Both: alive. D names the leases that it still wants."""

    leases: list[LeaseName] = []


Message = Hello | Welcome | Refused | Offer | Progress | Withdraw | Done | Settled | Ping

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def require_sendable(message: Message) -> None:
    """Raises `CacheStateError` for a message that the peer would refuse, and the link with it."""
    try:
        frame = encode(message)
        decode(frame)
    except (PeerRefusedError, UnicodeEncodeError, OverflowError) as error:
        raise CacheStateError(f"a {type(message).__name__} cannot be sent: {error}") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise CacheStateError(f"a {type(message).__name__} of {len(frame)} bytes is above {MAX_FRAME_BYTES}")


def decode(frame: bytes | bytearray) -> Message:
    """Raises `PeerRefusedError` for anything else than a message."""
    try:
        return _DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerRefusedError(f"a message of the peer cannot be read: {error}") from None
