"""SocketPlane: the reference data plane. Plain TCP, nothing to install, memory of the CPU only."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from ..errors import CacheStateError, ConfigError, PeerRefusedError, RemoteReadError
from ..worker.ops.rows import BlockRows
from .authentication import prove_to_peer
from .channel import connect
from .grants import Grants
from .plane import DataPlane, Source
from .read_protocol import Registered
from .read_server import ReadServer
from .settings import require_secret
from .socket_source import SocketSource

__all__ = ["SocketPlane"]


class _Address(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    host: str
    port: int
    plane: bytes
    """Random, so that a peer that restarted behind the same port is another one."""


_KIND = "socket"


class SocketPlane(DataPlane):
    """Listens on `host` and no other address; both ends of a connection prove that they know `secret`.

    With `checksums` every request carries a 64-bit sum over its bytes, which costs both sides one pass over them: a
    bit that changed on the way, or bytes that were written meanwhile, are a `RemoteReadError`. What travels is not
    encrypted.
    """

    def __init__(self, host: str, secret: bytes, *, port: int = 0, checksums: bool = False) -> None:
        """Raises `ConfigError` when it cannot listen there."""
        self._secret = require_secret(secret)
        self._checksums = checksums
        self._grants = Grants()
        self._views: list[memoryview] = []
        self._registered = Registered(np.empty(0, np.int64), np.empty(0, np.int64))
        plane = os.urandom(16)
        self._server = ReadServer(host, port, secret, _purpose(plane), self._grants)
        self._address = _Address(_KIND, host, self._server.port, plane)

    def register(self, regions: Sequence[BlockRows]) -> None:
        if self._views:
            raise CacheStateError("tensors were registered already: a plane is made for one set of them")
        if any(region.on_gpu for region in regions):
            raise ConfigError("the socket plane reads memory of the CPU only: choose another one for tensors on a GPU")
        if any(not region.is_dense for region in regions):
            raise CacheStateError("a tensor that peers read must be one contiguous range")
        self._views = [region.array.reshape(-1).data for region in regions]
        sizes = np.array([(region.num_rows * region.row_bytes, region.row_bytes) for region in regions], np.int64)
        self._registered = Registered(*np.ascontiguousarray(sizes.reshape(-1, 2).T))
        self._server.serve(self._views, self._registered)

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._address)

    def open(self, address: bytes, deadline: float) -> Source:
        try:
            peer = msgspec.msgpack.decode(address, type=_Address)
        except msgspec.MsgspecError:
            peer = None
        if peer is None or peer.kind != _KIND:
            raise PeerRefusedError("the peer has another data plane: give prefill and decode servers the same one")
        where = f"{peer.host}:{peer.port}"
        try:
            channel = connect(peer.host, peer.port, deadline)
        except OSError as error:
            raise RemoteReadError(f"cannot connect to {where}: {error}") from None
        try:
            prove_to_peer(channel, self._secret, _purpose(peer.plane), deadline)
        except (OSError, EOFError) as error:
            channel.close()
            raise RemoteReadError(f"{where} did not finish the handshake: {error}") from None
        except PeerRefusedError:
            channel.close()
            raise
        return SocketSource(channel, self._views, checksums=self._checksums)

    def grant(self, lease: str, slots: Collection[int]) -> None:
        self._grants.grant(lease, slots)

    def revoke(self, lease: str) -> None:
        self._grants.revoke(lease)

    def close(self) -> None:
        self._server.close()

    @property
    def num_refused(self) -> int:
        """Connections and requests of peers that were refused or failed."""
        return self._server.num_refused


def _purpose(plane: bytes) -> bytes:
    return b"data " + plane
