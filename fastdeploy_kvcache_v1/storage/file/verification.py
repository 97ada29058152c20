"""Reads values back and checks their seals."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

from ..base import StoreKey
from ..seal import TRAILER_BYTES, is_sealed
from .value_files import StoredFile

__all__ = ["Verified", "is_whole", "verified"]


class Verified(NamedTuple):
    """What was read, and what of it is not what was stored."""

    num_values: int
    num_bytes: int
    damaged: list[StoredFile]
    num_vanished: int
    """Evicted or removed by other processes before they could be read."""


def verified(files: Iterable[StoredFile]) -> Verified:
    """Read all of `files`. Raises `OSError` when one cannot be read for a reason that says nothing about its bytes."""
    num_values = num_bytes = num_vanished = 0
    damaged = []
    for file in files:
        try:
            if not is_whole(file.path, file.namespace):
                damaged.append(file)
        except FileNotFoundError:
            num_vanished += 1
            continue
        num_values += 1
        num_bytes += file.num_bytes
    return Verified(num_values, num_bytes, damaged, num_vanished)


def is_whole(path: str, namespace: str) -> bool:
    """True if the file has the bytes that were sealed for its key in the namespace of that digest. Raises `OSError`."""
    try:
        with open(path, "rb", buffering=0, opener=_without_links) as file:
            content = memoryview(file.read())
    except OSError as error:
        if error.errno == errno.EIO:  # the disk has lost the bytes
            return False
        raise
    return len(content) >= TRAILER_BYTES and is_sealed(content, StoreKey(os.path.basename(path)), namespace=namespace)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
