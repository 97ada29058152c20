"""What the storage tier has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from ...telemetry.metrics import counter, part
from ..messages import LoadDone, StoreDone

__all__ = ["MoveTotals", "StorageCounters"]


@dataclass
class MoveTotals:
    """One direction."""

    blocks: int = counter("Blocks that went between a tier and the store")
    bytes: int = counter("Bytes that went between a tier and the store")
    seconds: float = counter("Time that loads or stores took")
    failures: int = counter("Requests to the store that failed")

    def add(self, answer: LoadDone | StoreDone, num_blocks: int) -> None:
        """A rank has answered, and has moved `num_blocks` blocks."""
        self.blocks += num_blocks
        self.bytes += answer.num_bytes
        self.seconds += answer.seconds
        self.failures += answer.error is not None


@dataclass
class StorageCounters:
    """One thread writes; any thread may read single fields."""

    load: MoveTotals = part(MoveTotals, direction="load")
    store: MoveTotals = part(MoveTotals, direction="store")
    queries: int = counter("Prefix lookups in the store")
    query_failures: int = counter("Prefix lookups in the store that failed")
    query_seconds: float = counter("Time that prefix lookups in the store took")
    queried_blocks: int = counter("Blocks that were looked up in the store")
    found_blocks: int = counter("Blocks that prefix lookups found in the store")
    damaged_blocks: int = counter("Stored blocks with a checksum mismatch, ignored from then on")
    skipped_store_blocks: int = counter(
        "Blocks evicted before they were stored, or not stored because the store was failing"
    )
    """Also those for which too many waited."""
    refused_store_blocks: int = counter("Blocks for which the store had no room")
    unaddressable_blocks: int = counter(
        "Blocks not stored: the store names blocks by token ids, and their KV depends on more"
    )
    """Neither asked for nor stored nor announced."""
    flushes: int = counter("Updates of the store's index with what this server has")
    flush_failures: int = counter("Updates of the store's index that failed; they are sent again")
    """In order."""
    dropped_flushes: int = counter("Updates of the store's index that were dropped: it is wrong about their blocks")
    """Too many waited for a store that fails."""
    late_requests: int = counter("Requests that started before their stored prefix had arrived")
    declined_requests: int = counter(
        "Requests that did not wait for their stored prefix: computing it is sooner than loading it"
    )
