"""Target: which tier loads fill, and how the store is told which blocks are meant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ...contract.messages import BlockHash, BlockHashes, CacheLevel
from ...scheduler.cache_manager import CacheManager
from .open_copies import OpenCopies
from .store_link import StoreLink

__all__ = ["HostTarget", "Prefix", "Target"]


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first blocks of a prompt, as many as may come from the store."""

    hashes: Sequence[BlockHash]
    token_ids: tuple[int, ...] = ()
    """Of all these blocks, where the store names them so."""


class Target(ABC):
    """For a store and the tier that it exchanges blocks with. One thread uses it; nothing here blocks."""

    level: CacheLevel
    num_blocks: int
    """Size of the tier."""

    @property
    def is_serving(self) -> bool:
        """False: there is no store to ask now."""
        return True

    @abstractmethod
    def prefix(self, sequence: BlockHashes, token_ids: Sequence[int]) -> Prefix:
        """What the store may have of a prompt: all whole blocks before its last token that it can tell apart."""

    @abstractmethod
    def count_present(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first blocks of a prompt are where loaded ones can follow them."""

    @abstractmethod
    def room(self) -> int:
        """Slots that a load may take now, from other blocks too. What it cannot have now it may have later."""

    @abstractmethod
    def may_fill(self, step: int, since: float) -> bool:
        """What used slots that were lent `after_step` `step` (see `LoadSlots`), at the time `since`, has ended."""

    def waits_for_batch(self, step: int) -> bool:
        """Whether slots that were lent `after_step` `step` stay so until the workers are sent one more batch."""
        return False

    @abstractmethod
    def query(self, query_id: str, prefix: Prefix, begin: int) -> None:
        """Ask how many blocks of `prefix` are stored, from block `begin` on. Answered by one `QueryDone`."""

    @abstractmethod
    def load(self, load_id: str, prefix: Prefix, begin: int, slots: Sequence[int], since: float) -> None:
        """Fill `slots`, lent at the time `since`, with the blocks of `prefix` from `begin` on. Answered by one
        `LoadDone`.
        """

    def touch(self, touch_id: str, hashes: Sequence[BlockHash]) -> bool:
        """These blocks, from the first one of a prompt on, are in use. Returns True if one `TouchDone` will answer."""
        return False


class HostTarget(Target):
    """Blocks have keys that follow from their hashes, and go through the host tier."""

    level = CacheLevel.HOST

    def __init__(self, manager: CacheManager, link: StoreLink, copies: OpenCopies) -> None:
        self.num_blocks = manager.config.num_host_blocks
        self._manager = manager
        self._block_size = manager.config.block_size
        self._link = link
        self._copies = copies

    @property
    def is_serving(self) -> bool:
        return self._link.is_serving

    def prefix(self, sequence: BlockHashes, token_ids: Sequence[int]) -> Prefix:
        return Prefix(sequence.hashes[: max(0, sequence.num_tokens - 1) // self._block_size])

    def count_present(self, hashes: Sequence[BlockHash]) -> int:
        return self._manager.count_cached(hashes)

    def room(self) -> int:
        return self.num_blocks

    def may_fill(self, step: int, since: float) -> bool:
        return self._copies.have_ended(step)

    def query(self, query_id: str, prefix: Prefix, begin: int) -> None:
        self._link.query(query_id, prefix.hashes[begin:])

    def load(self, load_id: str, prefix: Prefix, begin: int, slots: Sequence[int], since: float) -> None:
        self._link.load(load_id, prefix.hashes[begin : begin + len(slots)], slots)

    def touch(self, touch_id: str, hashes: Sequence[BlockHash]) -> bool:
        self._link.touch(touch_id, hashes)
        return True
