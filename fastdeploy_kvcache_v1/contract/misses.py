"""Why tokens of a prompt were not hits."""

from __future__ import annotations

import enum
from typing import NamedTuple

from .messages import CacheLevel

__all__ = ["Miss", "MissReason", "StoredPrefix"]


class MissReason(str, enum.Enum):
    """Why a block was missed. Tokens behind the last full block have the reason of the block before them."""

    NEVER_SEEN = "never_seen"
    """No block that left the cache begins like this one, as far as the manager remembers."""
    NOT_SEEN_LATELY = "not_seen_lately"
    """The block was cached, too long ago to say more."""
    EVICTED_DEVICE = "evicted_device"
    """The block was evicted from the device tier, and the host had no copy."""
    EVICTED_HOST = "evicted_host"
    EVICTED_STORAGE = "evicted_storage"
    """The block was evicted, and the store has it no longer."""
    PARTIAL_BLOCK = "partial_block"
    """All full blocks before the last token were hits: a block that is not full is never cached."""
    BELOW_THRESHOLD = "below_threshold"
    """The missing part is too short to be looked up in the store, or to be loaded."""
    IN_FLIGHT = "in_flight"
    """Another running request computes the block, or a copy of it was under way."""
    NOT_WORTH_LOADING = "not_worth_loading"
    """The store has the block, and computing it is sooner than loading it."""
    STORE_LATE = "store_late"
    """The store has the block, or may have it, but it had not arrived when the request started."""
    STORE_ABSENT = "store_absent"
    """The block was evicted, and the store does not have it."""
    STORE_DAMAGED = "store_damaged"
    """The stored block has a checksum mismatch."""
    RESET = "reset"
    """The cache was reset."""
    WEIGHTS = "weights"
    """The cache was reset for new weights."""
    COPY_FAILED = "copy_failed"
    """A copy that should have filled the block, or one before it, failed."""
    SKIPPED_BY_REQUEST = "skipped_by_request"
    """The request does not read the cache."""


class Miss(NamedTuple):
    """What a request missed. It names no text, token, hash or salt."""

    reason: MissReason
    """Reason of the first token that was not a hit. Later tokens may have others."""
    at_token: int
    """Index of that token: the number of hits."""
    num_tokens: int
    """Prompt tokens that were not hits, at least the last one."""
    tier_last_held: CacheLevel | None = None
    """Tier that the first missing block left last, if it was evicted."""
    evicted_s_ago: float | None = None
    blocks_short: int | None = None
    """Blocks lost by eviction since: with so many more, that tier would still hold the block."""


class StoredPrefix(NamedTuple):
    """What the storage tier knew of a prompt when its request started."""

    end: int = 0
    """Blocks before it are in the store, or may be."""
    reason: MissReason | None = None
    """Why those of them that are missing were not loaded."""
    beyond: MissReason | None = None
    """Reason of evicted blocks from `end` on, if the store has something to do with it."""
