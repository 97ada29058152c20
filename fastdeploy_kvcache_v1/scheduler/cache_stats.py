"""Counters and gauges of the scheduler half."""

from __future__ import annotations

from dataclasses import dataclass

from ..telemetry.metrics import counter, gauge, part, source

MISSED = "Tokens of admitted requests that read the cache and did not hit, by why their block was missed"


@dataclass
class Counters:
    """Counts since start, which never fall: of tokens, blocks or events, as the names say."""

    requests_admitted: int = counter("Requests admitted, counted with their tokens when their first step is taken")
    requests_resumed: int = counter("Preempted requests that were admitted again; not among the admitted ones")
    requests_finished: int = counter("Requests that ended")
    requests_preempted: int = counter("Requests preempted for lack of device blocks or after a failed copy")
    requests_rolled_back: int = counter("Admitted requests that the scheduler took back before they ran")
    allocations_refused: int = counter("Allocations for which a tier had no room")
    query_tokens: int = counter("Tokens of admitted requests that read the cache")
    unread_tokens: int = counter("Tokens of admitted requests that do not read the cache: neither hits nor missed")
    device_hit_tokens: int = counter("Tokens served from the device tier")
    host_hit_tokens: int = counter("Tokens served from the host tier; see `failed_transfer_blocks` for failed copies")
    resumed_hit_tokens: int = counter("Tokens that resumed requests found again in either tier, mostly their own work")
    shared_prefill_requests: int = counter("Requests that waited while another request computed their prefix")
    shared_prefill_tokens: int = counter("Tokens that these requests found cached because they waited")
    device_evicted_blocks: int = counter("Blocks evicted from the device tier, with or without a host copy")
    device_lost_blocks: int = counter("Blocks evicted from the device tier without a host copy: their KV is lost")
    host_evicted_blocks: int = counter("Blocks evicted from the host tier")
    swap_out_blocks: int = counter("Blocks whose copy from device to host was planned")
    swap_in_blocks: int = counter("Blocks whose copy from host to device was planned")
    backup_skipped_blocks: int = counter("Host copies skipped for lack of room, counted again at every later hit")
    backup_declined_blocks: int = counter("Blocks not copied to the host, where they would replace ones worth more")
    named_session_requests: int = counter("Admitted requests whose client named their session")
    continued_session_requests: int = counter("Admitted requests that continue a session, named or inferred")
    predicted_session_returns: float = counter("Requests that continue a session, as the learned rates predicted")
    told_returns: int = counter("Times of return that clients told, ends of sessions included")
    wrong_told_returns: int = counter("Told times that proved wrong by more than a factor of 4, or ends by a return")
    duplicate_blocks: int = counter("Computed blocks kept twice, because another request uses the cached copy")
    failed_transfer_blocks: int = counter("Blocks forgotten after a failed copy")
    loaded_blocks: int = counter("Blocks from storage or a peer that were cached")
    wasted_load_blocks: int = counter(
        "Blocks from storage or a peer that were not cached: too late, or the cache was reset"
    )


@dataclass
class MissedTokens:
    """Prompt tokens of admitted requests that were not hits, by `MissReason`."""

    never_seen: int = counter(MISSED, "missed_tokens", by="reason")
    not_seen_lately: int = counter(MISSED, "missed_tokens", by="reason")
    evicted_device: int = counter(MISSED, "missed_tokens", by="reason")
    evicted_host: int = counter(MISSED, "missed_tokens", by="reason")
    evicted_storage: int = counter(MISSED, "missed_tokens", by="reason")
    partial_block: int = counter(MISSED, "missed_tokens", by="reason")
    below_threshold: int = counter(MISSED, "missed_tokens", by="reason")
    in_flight: int = counter(MISSED, "missed_tokens", by="reason")
    not_worth_loading: int = counter(MISSED, "missed_tokens", by="reason")
    store_late: int = counter(MISSED, "missed_tokens", by="reason")
    store_absent: int = counter(MISSED, "missed_tokens", by="reason")
    store_damaged: int = counter(MISSED, "missed_tokens", by="reason")
    reset: int = counter(MISSED, "missed_tokens", by="reason")
    weights: int = counter(MISSED, "missed_tokens", by="reason")
    copy_failed: int = counter(MISSED, "missed_tokens", by="reason")
    skipped_by_request: int = counter(MISSED, "missed_tokens", by="reason")


@source("cache manager")
@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """One consistent snapshot: the counters, and the number of blocks by place."""

    counters: Counters = part(Counters)
    num_requests: int = gauge("Requests that the cache manager knows")
    device_blocks: int = gauge("Size of the device tier in blocks")
    device_free_blocks: int = gauge("Device blocks that are neither used nor cached")
    device_cached_blocks: int = gauge("Device blocks that the prefix tree holds, used by requests or not")
    device_evictable_blocks: int = gauge("Cached device blocks that no request uses")
    host_blocks: int = gauge("Size of the host tier in blocks")
    host_free_blocks: int = gauge("Host blocks that hold nothing")
    host_cached_blocks: int = gauge("Host blocks that hold a cached block")
    device_loading_blocks: int = gauge("Device blocks being loaded from storage or a peer")
    host_loading_blocks: int = gauge("Host blocks being loaded from storage or a peer")
    sessions: int = gauge("Sessions whose return adaptive eviction expects, told or learned")
    watched_blocks: int = gauge("Blocks of past prompts from which adaptive eviction learns")
    recency_rules: bool = gauge("1 while adaptive eviction falls back to LRU, or no policy learns")
    events_overflowed: int = counter("Times that unread cache events were replaced by one snapshot")
