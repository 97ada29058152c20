"""StorageBackend: the contract of every store of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

__all__ = ["StorageBackend", "StorageUsage", "StoreKey"]

StoreKey = NewType("StoreKey", str)
"""Names one value within a namespace: letters, digits, `.`, `-` and `_`, at most 200 of them."""


@dataclass(frozen=True)
class StorageUsage:
    """What a store holds, of all namespaces."""

    num_values: int
    num_bytes: int
    capacity_bytes: int | None
    """None where the store does not say, or has no limit."""


class StorageBackend(ABC):
    """Values by key, in one namespace. A value never changes: whoever puts a key again puts the same bytes.

    Values may vanish at any time. Calls block, for as long as the store takes. One thread at a time uses an instance,
    but `get` may run beside `put`. Every call raises `StorageError`, and nothing else, when the store fails; what had
    been done by then stays done. A buffer is a writable contiguous view of bytes, and no longer touched once the call
    has returned: a backend that cannot promise that names itself with `may_write_late`.
    """

    name: str
    """As users write it."""
    may_write_late = False
    """After a failed `get`, bytes may still arrive in its buffers until `close` has returned."""

    @abstractmethod
    def count_stored(self, keys: Sequence[StoreKey]) -> int:
        """How many of `keys`, from the first one on, are stored, in one round trip. Reads no value."""

    @abstractmethod
    def get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` with the values of `keys`; returns how many arrived, from the first one on.

        A value that is missing, or has another size than its buffer, ends it: the buffers from there on hold anything.
        """

    @abstractmethod
    def put(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        """Store `buffers`; returns how many were written, which leaves out those that were stored already.

        All are stored then. A value is visible as a whole or not at all, whenever the process ends.
        """

    @abstractmethod
    def touch(self, keys: Sequence[StoreKey]) -> None:
        """The values of `keys` are in use, the first ones most: when room is short, others go first. May do nothing."""

    @abstractmethod
    def remove(self, keys: Sequence[StoreKey]) -> None:
        """Forget the values of `keys`, as far as they are stored."""

    @abstractmethod
    def usage(self) -> StorageUsage:
        """For people, not for decisions: may be expensive, and out of date."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
