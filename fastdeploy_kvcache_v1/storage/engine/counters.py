"""What the storage tier has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..messages import LoadDone, StoreDone

__all__ = ["MoveTotals", "StorageCounters"]


@dataclass
class MoveTotals:
    """One direction, all ranks."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Spent by the threads that move them."""
    failures: int = 0
    """Requests to the store that failed."""

    def add(self, answer: LoadDone | StoreDone, num_blocks: int) -> None:
        """A rank has answered, and has moved `num_blocks` blocks."""
        self.blocks += num_blocks
        self.bytes += answer.num_bytes
        self.seconds += answer.seconds
        self.failures += answer.error is not None


@dataclass
class StorageCounters:
    """One thread writes; any thread may read single fields."""

    load: MoveTotals = field(default_factory=MoveTotals)
    store: MoveTotals = field(default_factory=MoveTotals)
    queries: int = 0
    query_failures: int = 0
    query_seconds: float = 0.0
    queried_blocks: int = 0
    found_blocks: int = 0
    damaged_blocks: int = 0
    """Stored blocks whose bytes were not what they should be. They were forgotten."""
    skipped_store_blocks: int = 0
    """Not stored, because they had left their tier, too many waited, or the store was left alone."""
    refused_store_blocks: int = 0
    """Not stored, because the store had no room for them. Counted by each rank."""
    unaddressable_blocks: int = 0
    """Neither asked for nor stored nor announced: the store names blocks by token ids, and these need more than that to
    be told from others.
    """
    flushes: int = 0
    """Statements to the store's index about what this server has."""
    flush_failures: int = 0
    """Of them, attempts that failed. They are made again, in order."""
    dropped_flushes: int = 0
    """Given up, because too many waited for a store that fails: its index is wrong about these blocks."""
    late_requests: int = 0
    """Started before their stored prefix was there, because it took too long."""
    declined_requests: int = 0
    """Did not wait for their stored prefix, because computing it is sooner than loading it."""
