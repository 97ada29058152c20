"""SocketSource: the reading end of a data connection."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from ..errors import RemoteReadError
from .channel import Channel
from .plane import Source
from .read_protocol import HEAD, MOST_BYTES, MOST_SPANS, TRAILER, ReadRequest
from .spans import Spans, require_inside

_UNDER_WAY = 2
_LONGEST_REFUSAL = 1000


class SocketSource(Source):
    """The peer's bytes are received straight into the target spans."""

    def __init__(self, channel: Channel, views: Sequence[memoryview], *, checksums: bool) -> None:
        """`channel` is authenticated; `views` are this rank's own tensors."""
        self._channel = channel
        self._views = views
        self._sizes = np.array([len(view) for view in views], np.int64)
        self._checksums = checksums
        self._lock = threading.Lock()
        self._failure: str | None = None

    def read(self, lease: str, spans: Spans, deadline: float) -> None:
        require_inside(spans.table[:, [0, 2, 3]], self._sizes, "target")
        with self._lock:
            if self._failure is not None:
                raise RemoteReadError(self._failure)
            peer = self._channel.peer
            try:
                self._read(lease, spans, deadline)
            except (OSError, EOFError, RemoteReadError) as error:
                # What was asked for is still on its way: nobody receives it any more.
                self._failure = f"reading {spans.num_bytes} bytes from {peer} failed: {error}"
                self._channel.close()
                raise RemoteReadError(self._failure) from None

    def close(self) -> None:
        self._channel.shut_down()
        with self._lock:
            self._failure = self._failure or "the connection was closed"
            self._channel.close()

    def _read(self, lease: str, spans: Spans, deadline: float) -> None:
        under_way: deque[Spans] = deque()
        for batch in spans.batches(most_spans=MOST_SPANS, most_bytes=MOST_BYTES):
            if len(under_way) == _UNDER_WAY:
                self._receive(under_way.popleft(), deadline)
            asked = np.ascontiguousarray(batch.table[:, [0, 1, 3]], dtype="<i8").tobytes()
            request = ReadRequest(lease, self._checksums, asked)
            self._channel.send_frame(msgspec.msgpack.encode(request), deadline)
            under_way.append(batch)
        while under_way:
            self._receive(under_way.popleft(), deadline)

    def _receive(self, batch: Spans, deadline: float) -> None:
        refusal_bytes, num_bytes = HEAD.unpack(self._channel.receive_bytes(HEAD.size, deadline))
        if refusal_bytes:
            text = self._channel.receive_bytes(min(refusal_bytes, _LONGEST_REFUSAL), deadline)
            raise RemoteReadError(f"the peer refused: {text.decode(errors='replace')}")
        if num_bytes != batch.num_bytes:
            raise RemoteReadError(f"the peer sends {num_bytes} bytes where {batch.num_bytes} were asked for")
        targets = [self._views[region][start : start + count] for region, _, start, count in batch.table.tolist()]
        self._channel.receive(targets, deadline)
        still_open, checksum = TRAILER.unpack(self._channel.receive_bytes(TRAILER.size, deadline))
        if not still_open:
            raise RemoteReadError("the lease ended while its blocks were read")
        if self._checksums and checksum != checksum_of(targets):
            raise RemoteReadError("checksum mismatch: bytes changed on the way, or were written during the read")


def checksum_of(buffers: Sequence[memoryview]) -> int:
    """xxh3, 64 bits, over all of `buffers` one behind the other."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
