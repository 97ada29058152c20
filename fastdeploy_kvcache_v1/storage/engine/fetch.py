"""Fetch: the stored prefix of one request that waits, and the pieces in which it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...contract.messages import BlockHash
from ...contract.misses import MissReason
from .target import Prefix

__all__ = ["Fetch", "Piece"]


@dataclass(eq=False, slots=True)
class Fetch:
    request_id: str
    prefix: Prefix
    """All blocks that may be loaded, from the first one of the prompt on."""
    begin: int
    """The first block that is asked for: those before it were cached when the request came."""
    asked_at: float
    num_tokens: int
    """Of the whole prompt."""
    end: int | None = None
    """Blocks from here on are not loaded. None until the store has said how far it goes."""
    next: int = 0
    """First block of the next piece."""
    num_under_way: int = 0
    num_lent: int = 0
    """Blocks of all pieces so far. They have to stay in the tier until the request starts."""
    num_stored: int | None = None
    """Blocks from `begin` on that the store has; None until it has said so."""
    reason: MissReason = MissReason.STORE_LATE
    """Why stored blocks that are still missing are not loaded."""
    holds_up: bool = True
    """Its request waits for it. If not, the request starts when there is room for it."""
    is_declined: bool = False
    """Its request does not wait any more, because it is sooner without; what arrives before it starts is used."""
    is_trial: bool = False
    """Its request waits for one piece that is not worth it, to learn what loads take now."""

    @property
    def num_left(self) -> int:
        """Blocks that no piece has been lent slots for; 0 as long as it is not known how many are stored."""
        return 0 if self.end is None else max(0, self.end - self.next)

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.next >= self.end and not self.num_under_way


@dataclass(eq=False, slots=True)
class Piece:
    load_id: str
    begin: int
    """First block."""
    slots: tuple[int, ...]
    after_step: int
    fetch: Fetch
    begun_at: float
    is_wanted: bool = True
    """Not once the cache was reset."""
    is_failing: bool = False
    """It has failed, and bytes may still arrive."""

    @property
    def end(self) -> int:
        return self.begin + len(self.slots)

    @property
    def hashes(self) -> Sequence[BlockHash]:
        return self.fetch.prefix.hashes[self.begin : self.end]
