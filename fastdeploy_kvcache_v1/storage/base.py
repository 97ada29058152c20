"""StorageBackend: the contract of every store of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from ..errors import StorageError

__all__ = ["SlotMemory", "StorageBackend", "StorageFullError", "StoreKey"]

StoreKey = NewType("StoreKey", str)
"""Names one value within a namespace: letters, digits, `.`, `-` and `_`, at most 200 of them."""


@dataclass(frozen=True)
class SlotMemory:
    """Host slots, one behind the other."""

    view: memoryview
    """Writable bytes of all slots."""
    slot_bytes: int
    file: int | None = None
    """Descriptor by which other processes map the same bytes; None where they cannot."""
    life: int | None = None
    """Descriptor that every process which maps them must inherit, and keep open: when the last one of them has ended,
    nothing moves any more.
    """


class StorageFullError(StorageError):
    """A put found no room for some values. The store works: it makes room by itself, and nothing is to be closed."""

    def __init__(self, num_written: int, num_refused: int) -> None:
        super().__init__(f"the store has no room for {num_refused} of {num_written + num_refused} values")
        self.num_written = num_written
        self.num_refused = num_refused


class StorageBackend(ABC):
    """Values by key, in one namespace. A value never changes: whoever puts a key again puts the same bytes.

    Values may vanish at any time. Calls block, for as long as the store takes. One thread at a time uses an instance,
    but `get` may run beside `put`. Every call raises `StorageError`, and nothing else, when the store fails; what had
    been done by then stays done. A buffer is a writable contiguous view of bytes, and no longer touched once the call
    has returned: a backend that cannot promise that names itself with `may_write_late`.
    """

    name: str
    """As users write it."""
    namespace_digest: str
    """Which namespace it is: values are sealed for it (`seal.py`)."""
    may_write_late = False
    """After a failed `get`, bytes may still arrive in its buffers until `close` has returned."""

    def register(self, memory: SlotMemory) -> None:  # noqa: B027
        """Later buffers may lie in `memory`, too. Called before the first one, for each rank.

        The memory must stay until `close` has returned. Does nothing here: most stores need no registration.
        """

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

        All are stored then, or `StorageFullError` says how many are not. A value is visible as a whole or not at all,
        whenever the process ends.
        """

    @abstractmethod
    def touch(self, keys: Sequence[StoreKey]) -> None:
        """The values of `keys` are in use, the first ones most: when room is short, others go first. May do nothing."""

    @abstractmethod
    def remove(self, keys: Sequence[StoreKey]) -> None:
        """Forget the values of `keys`, as far as they are stored."""

    def remove_damaged(self, keys: Sequence[StoreKey]) -> None:
        """As `remove`: a load found bytes that were never put under `keys`, and others may be damaged, too."""
        self.remove(keys)

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
