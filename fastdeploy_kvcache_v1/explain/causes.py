"""Causes: what costs most hits on a server, and what to change.

A cause is found in what a server tells: its last requests with the reasons of their misses, and its metrics. Each
function here looks for one. To add a cause, add a function and its name in `CAUSES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ..contract.cache_report import CacheReport, Metrics, RequestMiss, missed

WORTH_ACTING = 0.03
"""Share of the prompt tokens that a cause must cost."""
MOST = 0.5
"""Share of requests from which on a pattern is what these requests have in common."""
LEAST_REQUESTS = 4
"""Requests that make a pattern."""

EVICTED_TIERS = ("evicted_host", "evicted_device", "not_seen_lately")
"""Reasons of blocks that left a tier for want of room; of the last one it is not known any more when."""
EVICTED = (*EVICTED_TIERS, "evicted_storage", "store_absent")

NEW = 0.75
"""Share of the tokens of new prompts that no request had before. The others are instructions in front of them."""


class Cause(NamedTuple):
    name: str
    share: float
    """Share of the prompt tokens of the last requests that it cost."""
    says: str
    do: str
    is_fault: bool = False
    """Worth acting on before it costs hits."""


@dataclass
class Seen:
    """A server's report, and the blocks that other servers behind the same address computed."""

    report: CacheReport
    computed_elsewhere: frozenset[str] = frozenset()
    """Digests of first missing blocks that other servers missed too, and so computed."""
    by_reason: Mapping[str, Sequence[RequestMiss]] = field(init=False)
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        grouped: dict[str, list[RequestMiss]] = defaultdict(list)
        for row in self.report.requests:
            grouped[row.miss.reason.value].append(row)
        self.by_reason = grouped
        self.prompt_tokens = sum(row.prompt_tokens for row in self.report.requests)

    def rows(self, *reasons: str) -> list[RequestMiss]:
        return [row for reason in reasons for row in self.by_reason.get(reason, ())]

    def share(self, rows: Iterable[RequestMiss]) -> float:
        return missed(rows) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def metrics(self) -> Metrics:
        return self.report.metrics

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric with these labels; 0 without one."""
        return sum(value for found, value in self.metrics.get(name, ()) if labels.items() <= found.items())


def other_server(seen: Seen) -> Cause | None:
    rows = [row for row in seen.report.requests if row.first in seen.computed_elsewhere]
    if not rows:
        return None
    return Cause(
        "other_server",
        seen.share(rows),
        f"Another server behind this address computed the same blocks: {len(rows)} of {len(seen.report.requests)} "
        "requests missed here what it has.",
        "Send all requests of a session to one server (by a hash of session_id), or share blocks by "
        "--kvcache-storage-backend.",
    )


def store_down(seen: Seen) -> Cause | None:
    failures = seen.value("storage_failures_total") + seen.value("storage_query_failures_total")
    if not seen.value("storage_is_left_alone"):
        return None
    rows = seen.rows("store_late", "store_absent", "evicted_storage")
    return Cause(
        "store_down",
        seen.share(rows),
        f"The store is left alone after repeated failures: {failures:.0f} failed requests to it.",
        "Check that the store runs and can be reached; it is used again by itself. The log has its errors.",
        is_fault=True,
    )


def store_damaged(seen: Seen) -> Cause | None:
    blocks, rows = seen.value("storage_damaged_blocks_total"), seen.rows("store_damaged")
    if not rows:
        return None
    return Cause(
        "store_damaged",
        seen.share(rows),
        f"{blocks:.0f} stored blocks had a wrong checksum and were not used.",
        "Check the disk or network of the store; `fastdeploy-kvcache storage verify DIR` reads all of a directory.",
    )


def store_late(seen: Seen) -> Cause | None:
    rows = seen.rows("store_late")
    if not rows or seen.value("storage_is_left_alone"):
        return None
    return Cause(
        "store_late",
        seen.share(rows),
        f"{len(rows)} requests started before their stored prefix had arrived.",
        "Use a faster store, or let requests wait longer for it.",
    )


def copy_path_refused(seen: Seen) -> Cause | None:
    unused = [labels for labels, value in seen.metrics.get("copy_path", ()) if not value and labels.get("reason")]
    rows = seen.rows("copy_failed")
    if not unused and not rows:
        return None
    says = []
    if unused:
        paths = sorted({f"{each['path']} ({each['reason']})" for each in unused})
        says.append(f"Copies between device and host do not use {', '.join(paths)}.")
    if rows:
        failures = seen.value("transfer_failures_total")
        says.append(f"{failures:.0f} copies failed since the start; {len(rows)} requests missed their blocks.")
    return Cause(
        "copy_path_refused",
        seen.share(rows),
        " ".join(says),
        "Run `fastdeploy-kvcache doctor` on this machine: it says what the driver refuses.",
        is_fault=bool(unused),
    )


def weights(seen: Seen) -> Cause | None:
    return _one_reason(
        seen,
        "weights",
        "The weights were updated: {} requests missed blocks that the old weights computed.",
        "Nothing: blocks of old weights must not be used. Hits come back as prompts are computed again.",
    )


def reset(seen: Seen) -> Cause | None:
    return _one_reason(
        seen,
        "reset",
        "The cache was reset: {} requests missed blocks that were in it.",
        "Find out who resets the cache. Hits come back as prompts are computed again.",
    )


def skipped(seen: Seen) -> Cause | None:
    return _one_reason(
        seen,
        "skipped_by_request",
        "{} requests asked not to read the cache.",
        "Remove skip_reading_prefix_cache or disable_prefix_caching from them.",
    )


def _one_reason(seen: Seen, reason: str, says: str, do: str) -> Cause | None:
    rows = seen.rows(reason)
    return Cause(reason, seen.share(rows), says.format(len(rows)), do) if rows else None


def scan(seen: Seen) -> Cause | None:
    """New prompts push out what others use: those of a tenant, or half of all prompts."""
    by_tenant: dict[int, list[RequestMiss]] = defaultdict(list)
    for row in seen.report.requests:
        by_tenant[row.tenant].append(row)
    who, groups, least = "One tenant", list(by_tenant.values()), WORTH_ACTING
    if len(groups) == 1:
        who, groups, least = "New prompts make up", [_new(seen)], MOST
    for rows in groups:
        size, mine = sum(row.prompt_tokens for row in rows), {row.request_id for row in rows}
        num_new = missed(row for row in rows if row.miss.reason.value == "never_seen")
        others = [row for row in seen.rows(*EVICTED) if row.request_id not in mine]
        if len(rows) < LEAST_REQUESTS or size < least * seen.prompt_tokens or num_new < NEW * size or not others:
            continue
        part = f"{size / seen.prompt_tokens:.0%} of the prompt tokens"
        says = f"{who} {part}." if len(by_tenant) == 1 else f"{who} sends {part} and hardly hits."
        return Cause(
            "scan",
            seen.share(others),
            f"{says} Their blocks push out those of others: {len(others)} requests missed evicted blocks.",
            "Send requests that are not repeated with skip_writing_prefix_cache: true, or with return_in_s: -1.",
        )
    return None


def _new(seen: Seen) -> list[RequestMiss]:
    """List the prompts of more than two blocks that differ from all others in their first quarter."""
    size = 2 * seen.report.block_size
    rows = [row for row in seen.rows("never_seen") if row.prompt_tokens > size]
    return [row for row in rows if row.miss.at_token <= (1 - NEW) * row.prompt_tokens]


def host_too_small(seen: Seen) -> Cause | None:
    """Blocks left the cache that prompts asked for later: the host would hold them if it were larger."""
    report, rows = seen.report, seen.rows(*EVICTED_TIERS)
    if not rows:
        return None
    ages = [row.miss.evicted_s_ago for row in rows if row.miss.evicted_s_ago is not None]
    ago = f" {median(ages):.0f} s before (median)" if ages else ""
    tiers = f"{report.device_blocks} device blocks and {report.host_blocks} host blocks are too few"
    if not report.host_blocks:
        tiers = f"There is no host tier, and {report.device_blocks} device blocks are too few"
    return Cause(
        "host_too_small",
        seen.share(rows),
        f"{tiers}: {len(rows)} of {len(report.requests)} requests missed blocks that were evicted{ago}.",
        f"Raise --swap-space{_how_much(seen, rows)}.",
    )


def _how_much(seen: Seen, rows: Sequence[RequestMiss]) -> str:
    short = sorted(row.miss.blocks_short for row in rows if row.miss.blocks_short is not None)
    if 2 * len(short) < len(rows):  # most left too long ago
        return ": `fastdeploy-kvcache explain --plan` tells what each size would have hit"
    most = short[len(short) * 4 // 5]
    block_bytes = seen.report.block_bytes
    size = f" ({most * block_bytes / 2**30:.3g} GiB)" if block_bytes else ""
    return f": {most} blocks more{size} would have held what four of five of them missed"


def changing_head(seen: Seen) -> Cause | None:
    size, rows = seen.report.block_size, _new(seen)
    num_long = sum(row.prompt_tokens > 2 * size for row in seen.report.requests)
    if len(rows) < LEAST_REQUESTS or len(rows) < MOST * num_long or scan(seen):
        return None
    end = round(median(row.miss.at_token for row in rows)) + size
    return Cause(
        "changing_head",
        seen.share(rows),
        f"{len(rows)} of {num_long} long prompts differ from all others within their first {end} tokens "
        f"(median prompt: {median(row.prompt_tokens for row in rows):.0f} tokens).",
        "Move what changes with each request (time, id, name) behind the instructions. New prompts look the same.",
    )


def short_prompts(seen: Seen) -> Cause | None:
    size = seen.report.block_size
    rows = [row for row in seen.report.requests if row.prompt_tokens <= size]
    if len(rows) < LEAST_REQUESTS or len(rows) < MOST * len(seen.report.requests):
        return None
    return Cause(
        "short_prompts",
        seen.share(rows),
        f"{len(rows)} of {len(seen.report.requests)} prompts are not longer than one block of {size} tokens, and only "
        "whole blocks before the last token can hit.",
        "Choose a smaller --block-size; or leave it: prompts this short are computed in a moment.",
    )


CAUSES: Sequence[Callable[[Seen], Cause | None]] = (
    other_server,
    store_down,
    store_damaged,
    copy_path_refused,
    scan,
    store_late,
    weights,
    reset,
    host_too_small,
    changing_head,
    short_prompts,
    skipped,
)


def causes(seen: Seen) -> list[Cause]:
    """List the causes worth acting on, the most expensive first; faults come before all others."""
    found = [cause for look in CAUSES if (cause := look(seen)) is not None]
    worth = [cause for cause in found if cause.is_fault or cause.share >= WORTH_ACTING]
    return sorted(worth, key=lambda cause: (not cause.is_fault, -cause.share))
