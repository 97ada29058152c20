"""What the storage tier has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """Not stored, because they had left the host, too many waited, or the store was left alone."""
    refused_store_blocks: int = 0
    """Not stored, because the store had no room for them. Counted by each rank."""
    late_requests: int = 0
    """Started before their stored prefix was there, because it took too long."""
