"""ReadServer: sends granted blocks to peers that know the secret; one thread per connection."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import PeerRefusedError
from .acceptor import Acceptor
from .authentication import accept_peer
from .channel import Channel
from .grants import Grants
from .read_protocol import HEAD, TRAILER, Registered, decode_request
from .socket_source import checksum_of

HANDSHAKE_S = 5.0
SEND_S = 10.0
"""For one request's bytes: a peer that takes longer is dropped, or its connection would hold a thread for ever."""
IDLE_S = 1e9
"""A connection may wait for its next request as long as its peer lives."""
MAX_CONNECTIONS = 256


class ReadServer:
    """Listens from the start; peers are answered once there are tensors to `serve`."""

    def __init__(self, host: str, port: int, secret: bytes, purpose: bytes, grants: Grants) -> None:
        self._secret = secret
        self._purpose = purpose
        self._grants = grants
        self._views: Sequence[memoryview] = ()
        self._registered: Registered | None = None
        self._acceptor = Acceptor(host, port, self._run, name="a data connection", most=MAX_CONNECTIONS)
        self.port = self._acceptor.port

    @property
    def num_refused(self) -> int:
        """Connections and requests that were refused or failed, too many connections among them."""
        return self._acceptor.num_refused

    def serve(self, views: Sequence[memoryview], registered: Registered) -> None:
        """Start to answer. Once."""
        self._views, self._registered = views, registered
        self._acceptor.start()

    def close(self) -> None:
        """When this returns, no thread touches the tensors. Idempotent."""
        self._acceptor.close()

    def _run(self, channel: Channel) -> None:
        accept_peer(channel, self._secret, self._purpose, time.monotonic() + HANDSHAKE_S)
        while self._answer(channel):
            pass

    def _answer(self, channel: Channel) -> bool:
        """One request. False when the peer has closed between two of them."""
        assert self._registered is not None
        try:
            frame = channel.receive_frame(time.monotonic() + IDLE_S)
        except (EOFError, ConnectionError):
            return False
        deadline = time.monotonic() + SEND_S
        try:
            request, table = decode_request(frame, self._registered)
            rows = self._registered.row_bytes[table[:, 0]]
            if not self._grants.allow(request.lease, table[:, 1] // rows, (table[:, 1] + table[:, 2] - 1) // rows):
                raise PeerRefusedError(f"lease {request.lease!r} is not open over these blocks")
        except PeerRefusedError as refusal:
            text = str(refusal).encode()[:1000]
            channel.send([HEAD.pack(len(text), 0), text], deadline)
            raise
        buffers = [self._views[region][start : start + count] for region, start, count in table.tolist()]
        channel.send([HEAD.pack(0, int(table[:, 2].sum())), *buffers], deadline)
        checksum = checksum_of(buffers) if request.with_checksum else 0
        channel.send([TRAILER.pack(self._grants.is_open(request.lease), checksum)], deadline)
        return True
