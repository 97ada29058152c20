"""StoreSide: what the storage tier tells the part of it that stores blocks, or announces them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...contract.messages import BlockHash, BlockHashes, CopyResult
from ..messages import StoreDone

__all__ = ["StoreSide"]


class StoreSide(ABC):
    """One thread uses it, and nothing in here blocks. What a side does not need to know it does not override."""

    def filled(self, step: int, slots: Sequence[int]) -> None:  # noqa: B027
        """`step` has filled these host slots, on every rank; in the order of their blocks."""

    def copy_failed(self, result: CopyResult) -> None:  # noqa: B027
        """The targets of a copy hold garbage."""

    def copies_doubted(self) -> None:  # noqa: B027
        """The targets of some copies may hold garbage, and nobody knows of which."""

    def request_ended(self, sequence: BlockHashes, token_ids: Sequence[int]) -> None:  # noqa: B027
        """A request that has computed blocks is over: what it committed is cached, or was evicted since."""

    def in_use(self, hashes: Sequence[BlockHash], num_stored: int) -> None:  # noqa: B027
        """Blocks from the first one of a prompt on were hit, and the first `num_stored` of them are stored."""

    def cache_reset(self) -> None:  # noqa: B027
        """`CacheManager.reset_cache` was called."""

    @abstractmethod
    def go_on(self) -> None:
        """Begin what can begin now: called after answers, reports and steps."""

    @abstractmethod
    def store_done(self, answer: StoreDone) -> None:
        """What the store answered."""

    @property
    @abstractmethod
    def is_left_alone(self) -> bool:
        """The store failed again and again, and gets nothing for a while."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """No block is kept for the store."""

    def seconds_to_next_deadline(self) -> float | None:
        """When to call `go_on` although nothing happens: not above 0 if that is past, None for never."""
        return None

    def held_since(self) -> float | None:
        """When the oldest device slots were taken that are kept for the store; None for no slots."""
        return None
