"""What travels on a data connection of `SocketPlane`: requests for spans, and their bytes between head and trailer."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import numpy as np

from ..errors import CacheStateError, PeerRefusedError
from .spans import Table, require_inside

__all__ = ["HEAD", "MOST_BYTES", "MOST_SPANS", "TRAILER", "ReadRequest", "Registered", "decode_request"]

MOST_SPANS = 1024
MOST_BYTES = 16 << 20
"""Of one request. Two are under way, so that the peer never waits for the next one."""

HEAD = struct.Struct("<IQ")
"""Bytes of a refusal's text, 0 for none; bytes that follow. After a refusal the peer closes."""

TRAILER = struct.Struct("<?Q")
"""Whether the lease was still open after the last byte; the checksum over all bytes, 0 where none was asked for."""


class ReadRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Asks for some spans."""

    lease: str
    with_checksum: bool
    spans: bytes
    """int64 `[spans, 3]`, little-endian: region, offset, bytes."""


class Registered(NamedTuple):
    """What bounds a request: one entry per region."""

    region_bytes: Table
    row_bytes: Table


_DECODER = msgspec.msgpack.Decoder(ReadRequest)


def decode_request(frame: bytes | bytearray, registered: Registered) -> tuple[ReadRequest, Table]:
    """The request and its spans `[spans, 3]`, each inside its region. Raises `PeerRefusedError`."""
    try:
        request = _DECODER.decode(frame)
        table = np.frombuffer(request.spans, dtype="<i8").reshape(-1, 3)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerRefusedError(f"a request for blocks cannot be read: {error}") from None
    if not 1 <= len(table) <= MOST_SPANS:
        raise PeerRefusedError(f"a request has {len(table)} spans, 1 to {MOST_SPANS} are allowed")
    try:
        require_inside(table, registered.region_bytes, "source")
    except CacheStateError as error:
        raise PeerRefusedError(f"a request names blocks that do not exist: {error}") from None
    if (total := int(table[:, 2].sum())) > MOST_BYTES:
        raise PeerRefusedError(f"a request asks for {total} bytes, {MOST_BYTES} are allowed")
    return request, table
