"""A block that proves what it holds: a trailer behind its bytes with a checksum over them, over the block's key, and
over its namespace.

So a value that a store mixed up, tore or damaged, or that was moved by hand, is a miss, never a wrong token. The
trailer lies in the host slot itself, which makes slot and stored value the same bytes: no copy on either way.
"""

from __future__ import annotations

import struct

import xxhash

from .base import StoreKey

__all__ = ["TRAILER_BYTES", "is_sealed", "seal"]

_TRAILER = struct.Struct("<8sQ16s")
_MAGIC = b"FDKVBLK\x02"
"""The last byte is the version of this format."""

TRAILER_BYTES = 64
"""Of every stored block: the trailer, and zeros, so that slots stay aligned to cache lines."""


def seal(buffer: memoryview, key: StoreKey, *, namespace: str) -> None:
    """Write the trailer into the last `TRAILER_BYTES` of `buffer`, for the bytes before them, which are those of `key`
    in the namespace of that digest.
    """
    end = len(buffer) - TRAILER_BYTES
    trailer = _TRAILER.pack(_MAGIC, end, _checksum(buffer[:end], key, namespace))
    buffer[end:] = trailer.ljust(TRAILER_BYTES, b"\0")


def is_sealed(buffer: memoryview, key: StoreKey, *, namespace: str) -> bool:
    """True if `buffer` is what `seal` made of the block of `key` in the namespace of that digest."""
    end = len(buffer) - TRAILER_BYTES
    magic, length, checksum = _TRAILER.unpack_from(buffer, end)
    return (magic, length) == (_MAGIC, end) and checksum == _checksum(buffer[:end], key, namespace)


def _checksum(content: memoryview, key: StoreKey, namespace: str) -> bytes:
    digest = xxhash.xxh3_128(content)
    digest.update(f"{namespace}.{key}".encode())
    return digest.digest()
