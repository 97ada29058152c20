"""Counters and gauges of the scheduler half."""

from __future__ import annotations

from dataclasses import dataclass

from ..telemetry.metrics import counter, gauge, part, source


@dataclass
class Counters:
    """Counts since start that never fall. Units are in the names: tokens, blocks, or events."""

    requests_admitted: int = counter("Requests whose first step was handed over")
    """Counted, with their tokens below, when the step of their first allocation is taken."""
    requests_resumed: int = counter("Preempted requests that were admitted again")
    """They are in no number of admitted ones."""
    requests_finished: int = counter("Requests that ended")
    requests_preempted: int = counter("Requests preempted for lack of device blocks or after a failed copy")
    requests_rolled_back: int = counter("Matches that the scheduler took back")
    allocations_refused: int = counter("Allocations for which the device tier had no room")
    query_tokens: int = counter("Tokens of admitted requests that read the cache")
    device_hit_tokens: int = counter("Tokens served from the device tier")
    host_hit_tokens: int = counter(
        "Tokens served from the host tier; `failed_transfer_blocks` says what failed on the way"
    )
    resumed_hit_tokens: int = counter("Tokens that preempted requests found again when they resumed")
    """In either tier: mostly their own work."""
    shared_prefill_requests: int = counter("Requests that waited while another request computed their prefix")
    shared_prefill_tokens: int = counter("Tokens that these requests did not compute because they waited")
    """Found cached, beyond those of before the wait."""
    device_evicted_blocks: int = counter("Blocks that left the device tier")
    """Their copy there was given up to make room, with or without a host copy."""
    device_lost_blocks: int = counter("Blocks that left the device tier without a host copy")
    """Their KV is gone."""
    host_evicted_blocks: int = counter("Blocks that left the host tier")
    swap_out_blocks: int = counter("Blocks whose copy from device to host was planned")
    swap_in_blocks: int = counter("Blocks whose copy from host to device was planned")
    backup_skipped_blocks: int = counter("Host copies for which there was no room")
    """The write policy wanted them; counted again at every later hit."""
    backup_declined_blocks: int = counter(
        "Blocks not copied to the host because what they would push out is worth more"
    )
    duplicate_blocks: int = counter(
        "Computed blocks that are kept twice, because another request uses the copy that is cached"
    )
    failed_transfer_blocks: int = counter("Blocks forgotten after a failed copy")
    loaded_blocks: int = counter("Blocks from outside the two tiers that were cached")
    wasted_load_blocks: int = counter("Blocks from outside the two tiers that were not cached")
    """Cancelled, cached meanwhile, or their prefix was evicted."""


@source("cache manager")
@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """One consistent snapshot: the counters, and how many blocks are where."""

    counters: Counters = part(Counters)
    num_requests: int = gauge("Requests that the cache manager knows")
    device_blocks: int = gauge("Size of the device tier in blocks")
    device_free_blocks: int = gauge("Device blocks that are neither used nor cached")
    device_cached_blocks: int = gauge("Device blocks that the prefix tree holds")
    """Used by requests or not."""
    device_evictable_blocks: int = gauge("Cached device blocks that no request uses")
    host_blocks: int = gauge("Size of the host tier in blocks")
    host_free_blocks: int = gauge("Host blocks that hold nothing")
    host_cached_blocks: int = gauge("Host blocks that hold a cached block")
    device_loading_blocks: int = gauge("Device blocks that a load from outside fills")
    host_loading_blocks: int = gauge("Host blocks that a load from outside fills")
    quarantined_blocks: int = gauge("Blocks of both tiers whose load is not wanted any more but has not ended")
    """Among the loading ones."""
    watched_blocks: int = gauge("Blocks of past prompts by which the adaptive eviction learns")
    recency_rules: bool = gauge("1 while adaptive eviction falls back to LRU")
    """No eviction policy goes by what was learned: none does, or recency was found to be as good."""
    events_overflowed: int = counter("Times that unread cache events became one snapshot")
