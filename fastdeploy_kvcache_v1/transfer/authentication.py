"""Both ends of a connection prove that they know the shared secret, which itself never travels.

Each end names a random nonce and signs both nonces, its side, and what the connection is for, with HMAC-SHA256. A
proof is good for one side of one connection, so it cannot be replayed or sent back.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from ..errors import PeerRefusedError
from .channel import Channel

__all__ = ["accept_peer", "prove_to_peer"]

_NONCE = 32
_PROOF = 32


def accept_peer(channel: Channel, secret: bytes, purpose: bytes, deadline: float) -> None:
    """The end that was connected to. Raises `PeerRefusedError`, else as `Channel`."""
    ours = os.urandom(_NONCE)
    channel.send([ours], deadline)
    answer = bytes(channel.receive_bytes(_NONCE + _PROOF, deadline))
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", purpose, ours, theirs)):
        raise PeerRefusedError(f"{channel.peer} does not know the shared secret, or asks for a server that is gone")
    channel.send([_proof(secret, b"server", purpose, ours, theirs)], deadline)


def prove_to_peer(channel: Channel, secret: bytes, purpose: bytes, deadline: float) -> None:
    """The end that connected. Raises `PeerRefusedError`, else as `Channel`."""
    theirs = bytes(channel.receive_bytes(_NONCE, deadline))
    ours = os.urandom(_NONCE)
    channel.send([ours, _proof(secret, b"client", purpose, theirs, ours)], deadline)
    peer = channel.peer
    try:
        proof = bytes(channel.receive_bytes(_PROOF, deadline))
    except (EOFError, ConnectionError):
        raise PeerRefusedError(
            f"{peer} refused us: it has another shared secret, or it restarted behind the same port"
        ) from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", purpose, theirs, ours)):
        raise PeerRefusedError(f"{peer} does not know the shared secret: give all servers the same one")


def _proof(secret: bytes, side: bytes, purpose: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    text = b"|".join((b"fastdeploy-kvcache", side, purpose.hex().encode(), server_nonce, client_nonce))
    return hmac.digest(secret, text, hashlib.sha256)
