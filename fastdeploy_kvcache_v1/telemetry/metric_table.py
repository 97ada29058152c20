"""Every metric of both servers: name, help, kind, labels, and the counter behind it. Needs no Prometheus library.

A new counter gets a row here, and both servers export it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

PREFIX = "fastdeploy:kvcache_v1_"
"""Of every name."""


class Kind(str, enum.Enum):
    COUNTER = "counter"
    """Never falls. Prometheus adds `_total` to its name."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(enum.Enum):
    """The object whose attributes a server exports."""

    COUNTERS = "cache manager: Counters"
    STATS = "cache manager: CacheStats"
    COPIES = "worker rank: RankCopies"
    """One object per rank: its rows have the label `rank` as well."""
    STORAGE = "storage tier: StorageTier"
    """Only where there is storage."""
    TRACE = "trace recorder: TraceRecorder"
    """Only where a trace is recorded."""
    REPORTS = "FastDeploy's engine: CopyReports"
    OVERLAY = "FastDeploy's engine: Overlay"
    UNCACHED = "FastDeploy's engine: Uncached"
    TRANSFERS = "prefill or decode role: its ledger"
    """Only with a role: its rows have the label `side` as well."""
    GRANTS = "FastDeploy's engine with the role decode: Grants"
    REMOTE_PREFILLS = "embedded engine with the role decode: PrefillCounters"
    ENGINE = "embedded engine"

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that the server adds to a row, one value for each object of this source."""
        return {Source.COPIES: ("rank",), Source.TRANSFERS: ("side",)}.get(self, ())

    @property
    def servers(self) -> str:
        """Which ones export its rows."""
        theirs = Source.REPORTS, Source.OVERLAY, Source.UNCACHED, Source.GRANTS
        ours = Source.ENGINE, Source.REMOTE_PREFILLS
        servers = {**dict.fromkeys(theirs, "FastDeploy"), **dict.fromkeys(ours, "embedded")}
        return servers.get(self, "both")


@dataclass(frozen=True, eq=False)
class Metric:
    """One row. Rows of one name differ in the values of their labels."""

    name: str
    """Without `PREFIX`; counters without `_total`."""
    help: str
    kind: Kind
    source: Source
    attribute: str = ""
    """Path from the source object to the value, `swap_in.blocks` for example. By default the name."""
    labels: Mapping[str, str] = field(default_factory=dict)
    observed_labels: tuple[str, ...] = ()
    """Further ones, whose values are part of what is observed."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        return (*self.labels, *self.observed_labels, *self.source.labels)

    def value(self, source: object) -> float:
        """Of this row in an object of its source."""
        number: float = attrgetter(self.attribute or self.name)(source)
        return number


def _counters(**helps: str) -> tuple[Metric, ...]:
    return tuple(Metric(name, text, Kind.COUNTER, Source.COUNTERS) for name, text in helps.items())


def _gauges(**helps: str) -> tuple[Metric, ...]:
    return tuple(Metric(name, text, Kind.GAUGE, Source.STATS) for name, text in helps.items())


def _both_ways(name: str, text: str, attribute: str) -> tuple[Metric, ...]:
    return tuple(
        Metric(name, text, Kind.COUNTER, Source.COPIES, f"swap_{direction}.{attribute}", {"direction": direction})
        for direction in ("in", "out")
    )


def _moved(name: str, text: str, attribute: str) -> tuple[Metric, ...]:
    return tuple(
        Metric(name, text, Kind.COUNTER, Source.STORAGE, f"counters.{direction}.{attribute}", {"direction": direction})
        for direction in ("load", "store")
    )


def _stored(**helps: str) -> tuple[Metric, ...]:
    return tuple(
        Metric(f"storage_{name}", text, Kind.COUNTER, Source.STORAGE, f"counters.{name}")
        for name, text in helps.items()
    )


def _transfer(outcome: str) -> Metric:
    text = "Leases (prefill) and fetches (decode) by how they ended"
    return Metric("transfers_ended", text, Kind.COUNTER, Source.TRANSFERS, f"totals.{outcome}", {"outcome": outcome})


def _prompts(**helps: str) -> tuple[Metric, ...]:
    return tuple(Metric(name, text, Kind.COUNTER, Source.REMOTE_PREFILLS) for name, text in helps.items())


def _ended(outcome: str) -> Metric:
    text = "Requests by how they ended"
    return Metric("requests_ended", text, Kind.COUNTER, Source.ENGINE, f"counters.{outcome}", {"outcome": outcome})


def _queued(state: str) -> Metric:
    return Metric(
        "requests", "Requests by queue", Kind.GAUGE, Source.ENGINE, f"scheduler.num_{state}", {"state": state}
    )


def _uncached(reason: str) -> Metric:
    text = "Requests served without the cache, by reason"
    return Metric("uncached_requests", text, Kind.COUNTER, Source.UNCACHED, reason, {"reason": reason})


COPY_PATH = Metric(
    "copy_path",
    "1 for a way in which blocks are copied, 0 for one that was left, and why",
    Kind.GAUGE,
    Source.COPIES,
    observed_labels=("direction", "path", "reason"),
)
TIME_TO_FIRST_TOKEN = Metric(
    "time_to_first_token_seconds", "From the arrival of a request to its first token", Kind.HISTOGRAM, Source.ENGINE
)
STORAGE_LATENCY = Metric(
    "storage_latency_seconds",
    "Time that one request to the store took, by operation (query, load, store, flush)",
    Kind.HISTOGRAM,
    Source.STORAGE,
    observed_labels=("operation",),
)
OBSERVED = (COPY_PATH, TIME_TO_FIRST_TOKEN, STORAGE_LATENCY)
"""Rows without an attribute: a server sets them when something happens."""

STORAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Of `STORAGE_LATENCY`."""

TABLE: tuple[Metric, ...] = (
    *_gauges(
        device_blocks="Size of the device tier in blocks",
        device_free_blocks="Device blocks that are neither used nor cached",
        device_cached_blocks="Device blocks that the prefix tree holds",
        device_evictable_blocks="Cached device blocks that no request uses",
        host_blocks="Size of the host tier in blocks",
        host_free_blocks="Host blocks that hold nothing",
        host_cached_blocks="Host blocks that hold a cached block",
        device_loading_blocks="Device blocks that a load from outside fills",
        host_loading_blocks="Host blocks that a load from outside fills",
        quarantined_blocks="Blocks of both tiers whose load is not wanted any more but has not ended",
        num_requests="Requests that the cache manager knows",
        watched_blocks="Blocks of past prompts by which the adaptive eviction learns",
        recency_rules="1 while the eviction order is LRU, because what was learned is no better",
    ),
    *_counters(
        requests_admitted="Requests whose first step was handed over",
        requests_resumed="Preempted requests that were admitted again",
        requests_finished="Requests that ended",
        requests_preempted="Requests preempted for lack of device blocks or after a failed copy",
        requests_rolled_back="Matches that the scheduler took back",
        allocations_refused="Allocations for which the device tier had no room",
        query_tokens="Tokens of admitted requests that read the cache",
        device_hit_tokens="Tokens served from the device tier",
        host_hit_tokens="Tokens served from the host tier; `failed_transfer_blocks` says what failed on the way",
        resumed_hit_tokens="Tokens that preempted requests found again when they resumed",
        shared_prefill_requests="Requests that waited while another one computed a prefix of theirs",
        shared_prefill_tokens="Tokens that these requests did not compute because they waited",
        device_evicted_blocks="Blocks that left the device tier",
        device_lost_blocks="Blocks that left the device tier without a host copy",
        host_evicted_blocks="Blocks that left the host tier",
        swap_out_blocks="Blocks that the scheduler had copied from device to host",
        swap_in_blocks="Blocks that the scheduler had copied from host to device",
        backup_skipped_blocks="Host copies for which there was no room",
        backup_declined_blocks="Blocks not copied to the host because what they would push out is worth more",
        duplicate_blocks="Computed blocks that are kept twice, because another request uses the copy that is cached",
        failed_transfer_blocks="Blocks forgotten after a failed copy",
        loaded_blocks="Blocks from outside the two tiers that were cached",
        wasted_load_blocks="Blocks from outside the two tiers that were not cached",
    ),
    Metric("events_overflowed", "Times that unread cache events became one snapshot", Kind.COUNTER, Source.STATS),
    *_both_ways("swap_blocks", "Blocks that a worker rank copied", "blocks"),
    *_both_ways("swap_bytes", "Bytes that a worker rank copied", "bytes"),
    *_both_ways("swap_seconds", "Time that a worker rank's copies took", "seconds"),
    *_both_ways("transfer_failures", "Copies of a worker rank that failed", "failures"),
    Metric(
        "exposed_wait_seconds",
        "Time that compute stood still for copies",
        Kind.COUNTER,
        Source.COPIES,
        "exposed_wait_s",
    ),
    *_moved("storage_blocks", "Blocks that went between a tier and the store, of every rank", "blocks"),
    *_moved("storage_bytes", "Bytes that went between a tier and the store", "bytes"),
    *_moved("storage_seconds", "Time that threads of workers spent with the store", "seconds"),
    *_moved("storage_failures", "Requests to the store that failed", "failures"),
    *_stored(
        queries="Questions to the store how much of a prompt it has",
        query_failures="Questions to the store that failed",
        query_seconds="Time that the answers of the store took",
        queried_blocks="Blocks that the store was asked for",
        found_blocks="Blocks that the store said it has",
        damaged_blocks="Stored blocks whose bytes did not match their checksum, now forgotten",
        skipped_store_blocks="Blocks that left their tier before they were stored, or that a failing store was spared",
        refused_store_blocks="Blocks that the store had no room for, counted by each rank",
        unaddressable_blocks="Blocks left out because the store names blocks by token ids, and theirs do not say all",
        flushes="Statements about what this server has that the store's index took",
        flush_failures="Such statements that failed; they are made again",
        dropped_flushes="Such statements that were given up: the store's index is wrong about their blocks",
        late_requests="Requests that started before their stored prefix had arrived",
        declined_requests="Requests that did not wait for their stored prefix: computing it is sooner than loading it",
    ),
    Metric(
        "storage_waiting_requests",
        "Requests that wait for their stored prefix",
        Kind.GAUGE,
        Source.STORAGE,
        "num_waiting_requests",
    ),
    Metric(
        "storage_is_left_alone",
        "1 while the store is not asked because it failed again and again",
        Kind.GAUGE,
        Source.STORAGE,
        "is_left_alone",
    ),
    Metric("trace_lines", "Requests that the recorded trace has", Kind.COUNTER, Source.TRACE, "num_lines"),
    Metric(
        "trace_lost_lines",
        "Requests that the recorded trace lacks: the disk was full or too slow",
        Kind.COUNTER,
        Source.TRACE,
        "num_lost",
    ),
    Metric(
        "copy_reports_lost",
        "Workers' reports of copies that did not arrive; the next one makes up for them",
        Kind.COUNTER,
        Source.REPORTS,
        "num_lost",
    ),
    Metric(
        "copy_reports_unreadable",
        "Messages on the socket for workers' reports that cannot be read",
        Kind.COUNTER,
        Source.REPORTS,
        "num_unreadable",
    ),
    Metric(
        "changed_bodies",
        "FastDeploy's functions and classes that are others inside than those this package was written for",
        Kind.GAUGE,
        Source.OVERLAY,
        "num_changed_bodies",
    ),
    *(_uncached(reason) for reason in ("same_id", "tokens", "items", "failed")),
    Metric("transfer_open", "Open leases (prefill) or fetches (decode)", Kind.GAUGE, Source.TRANSFERS, "num_open"),
    Metric(
        "transfers_started",
        "Leases (prefill) or fetches (decode) that were begun",
        Kind.COUNTER,
        Source.TRANSFERS,
        "totals.started",
    ),
    *map(_transfer, ("arrived", "failed", "cancelled", "overdue")),
    Metric(
        "transfer_bytes",
        "Bytes of blocks that arrived (decode)",
        Kind.COUNTER,
        Source.TRANSFERS,
        "totals.num_bytes",
    ),
    Metric(
        "transfer_seconds",
        "Time of fetches that arrived, from their begin to their end (decode); it overlaps with the prefill",
        Kind.COUNTER,
        Source.TRANSFERS,
        "totals.seconds",
    ),
    Metric(
        "granted_requests",
        "Requests with blocks that wait for their content or their first token",
        Kind.GAUGE,
        Source.GRANTS,
        "num_waiting",
    ),
    Metric(
        "parked_blocks",
        "Blocks of requests that ended, to which a worker may still write",
        Kind.GAUGE,
        Source.GRANTS,
        "num_parked",
    ),
    Metric(
        "stray_first_tokens",
        "First tokens for which no request waited",
        Kind.COUNTER,
        Source.GRANTS,
        "num_stray_tokens",
    ),
    *_prompts(
        prompts_recomputed="Requests whose prompt the decode server computed after all",
        recomputed_prompt_tokens="Tokens of these prompts that were not found here",
        prompts_declined="Requests whose prompt the decode server computed from the start: too little was missing",
    ),
    _queued("running"),
    _queued("waiting"),
    _ended("finished"),
    _ended("aborted"),
    _ended("failed"),
    Metric("steps", "Batches sent to the worker", Kind.COUNTER, Source.ENGINE, "counters.steps"),
    Metric(
        "computed_tokens", "Tokens that went through the model", Kind.COUNTER, Source.ENGINE, "counters.computed_tokens"
    ),
    Metric("generated_tokens", "Tokens sampled", Kind.COUNTER, Source.ENGINE, "counters.generated_tokens"),
    Metric(
        "draft_tokens",
        "Guesses of a draft layer that were verified",
        Kind.COUNTER,
        Source.ENGINE,
        "counters.draft_tokens",
    ),
    Metric(
        "accepted_draft_tokens",
        "Verified guesses that were right",
        Kind.COUNTER,
        Source.ENGINE,
        "counters.accepted_draft_tokens",
    ),
)
"""Every row with a counter or a gauge behind it."""


def rows(*sources: Source) -> tuple[Metric, ...]:
    """Of `TABLE`, in its order."""
    return tuple(metric for metric in TABLE if metric.source in sources)
