"""Counters and gauges of the scheduler half."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts since start that never fall. Units are in the names: tokens, blocks, or events."""

    requests_admitted: int = 0
    """Requests whose first allocation was scheduled: counted, with their tokens below, when its step is taken."""
    requests_resumed: int = 0
    """Requests that ran before, were preempted and are admitted again; they are in no number of admitted ones."""
    requests_finished: int = 0
    requests_preempted: int = 0
    requests_rolled_back: int = 0
    allocations_refused: int = 0
    """`NoSpace` answers."""
    query_tokens: int = 0
    """Tokens of admitted requests at admission."""
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    """Tokens whose swap-in was planned; `failed_transfer_blocks` says what it did not bring."""
    resumed_hit_tokens: int = 0
    """Tokens that resumed requests found in either tier: mostly their own work."""
    shared_prefill_requests: int = 0
    """Admissions of requests that waited while another one computed a prefix of theirs."""
    shared_prefill_tokens: int = 0
    """Tokens that they found cached, beyond those of before the wait."""
    device_evicted_blocks: int = 0
    """Blocks whose device copy was given up to make room (with or without a host copy)."""
    device_lost_blocks: int = 0
    """Blocks among them that had no host copy: their KV is gone."""
    host_evicted_blocks: int = 0
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    backup_skipped_blocks: int = 0
    """Blocks that the write policy wanted on the host while there was no room, again at every later hit."""
    backup_declined_blocks: int = 0
    """Blocks that left the device without a host copy because what would have had to leave the host is worth more."""
    duplicate_blocks: int = 0
    """Blocks computed by a request although another one had cached them meanwhile."""
    failed_transfer_blocks: int = 0
    loaded_blocks: int = 0
    """Blocks that came from outside the two tiers and were cached."""
    wasted_load_blocks: int = 0
    """Blocks that came from outside and were not: cancelled, cached meanwhile, or their prefix was evicted."""


@dataclass(frozen=True)
class CacheStats:
    """One consistent snapshot: the counters, and how many blocks are where."""

    counters: Counters
    num_requests: int
    device_blocks: int
    device_free_blocks: int
    device_cached_blocks: int
    """Blocks owned by the prefix tree, used by requests or not."""
    device_evictable_blocks: int
    host_blocks: int
    host_free_blocks: int
    host_cached_blocks: int
    device_loading_blocks: int
    host_loading_blocks: int
    """Slots of loads that have not been completed: bytes may arrive in them."""
    quarantined_blocks: int
    """Slots among the loading ones of both tiers: their load is not wanted any more."""
    watched_blocks: int
    """Blocks of past prompts by which `ReuseHistory` learns."""
    recency_rules: bool
    """No eviction policy goes by what was learned: none does, or recency was found to be as good."""
    events_overflowed: int
