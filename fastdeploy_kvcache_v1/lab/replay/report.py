"""The result of a replay: as JSON, and as a table for people."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

from tqdm import tqdm

from .closed_loop import ClosedLoop
from .driver import Replay, ReplayOptions
from .told import as_told
from .trace import TraceRequest

SHOWN_OPTIONS = (
    *("window", "admissions_per_step", "waiting", "outputs", "verify"),
    *("closed_loop", "step_ms", "told", "told_error"),
)


def play(options: ReplayOptions, requests: Sequence[TraceRequest], *, bar: bool = False) -> dict[str, Any]:
    """The `summary` of a run over all `requests`; `bar` shows progress in a terminal.

    Raises `InvariantError` for an error in the manager.
    """
    replay = ClosedLoop(options) if options.closed_loop else Replay(options)
    begin = perf_counter()
    replay.run(tqdm(as_told(requests, options), unit="request", disable=None if bar else True, leave=False))
    return summary(replay, perf_counter() - begin)


def summary(replay: Replay, seconds: float) -> dict[str, Any]:
    """JSON-ready: times in microseconds, rates as shares of the input tokens."""
    config = replay.options.config
    num_host_hits = replay.num_host_hit_tokens // config.block_size
    times = sorted(replay.request_seconds)
    hit = {
        "device": replay.num_device_hit_tokens / max(1, replay.num_input_tokens),
        "host": replay.num_host_hit_tokens / max(1, replay.num_input_tokens),
    }
    return {
        "options": {
            "block_size": config.block_size,
            "device_blocks": config.num_device_blocks,
            "host_blocks": config.num_host_blocks,
            "write_policy": config.write_policy.value,
            "write_through_threshold": config.write_through_threshold,
            "eviction_policy": config.eviction_policy,
            **{name: getattr(replay.options, name) for name in SHOWN_OPTIONS},
        },
        "requests": len(times),
        "requests_too_long": replay.num_too_long,
        "outputs_cut": replay.num_outputs_cut,
        "input_tokens": replay.num_input_tokens,
        "hit_rate": {**hit, "total": hit["device"] + hit["host"]},
        "steps": replay.num_steps,
        "simulated_seconds": replay.now_ms / 1000 if isinstance(replay, ClosedLoop) else None,
        "blocks_swapped_out": replay.num_swap_out_copies,
        "blocks_swapped_in": replay.num_swap_in_copies,
        "swapped_out_per_host_hit": replay.num_swap_out_copies / num_host_hits if num_host_hits else None,
        "admissions_without_space": replay.num_no_space,
        "manager": asdict(replay.manager.stats()),
        "request_us": {name: 1e6 * percentile(times, share) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "seconds": seconds,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "verified_blocks": None if replay.shadow is None else replay.shadow.num_checked_blocks,
        "check": "clean",
    }


def percentile(ordered: list[float], share: float) -> float:
    """Nearest-rank percentile of sorted values; 0 without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(result: dict[str, Any]) -> str:
    """One fact per line."""
    options, hit, times = result["options"], result["hit_rate"], result["request_us"]
    counters = result["manager"]["counters"]
    rows = [
        ("requests", f"{result['requests']:,} ({result['input_tokens']:,} input tokens)"),
        ("tiers", f"{options['device_blocks']:,} device + {options['host_blocks']:,} host blocks of "
                  f"{options['block_size']} tokens, {options['write_policy']}, {options['eviction_policy']}"),
        ("hit rate", f"{hit['total']:.1%} (device {hit['device']:.1%}, host {hit['host']:.1%})"),
        ("evictions", f"{counters['device_evicted_blocks']:,} device blocks "
                      f"({counters['device_lost_blocks']:,} without a host copy), "
                      f"{counters['host_evicted_blocks']:,} host blocks"),
        ("swaps", f"{result['blocks_swapped_out']:,} blocks out{_per_hit(result)}, {result['blocks_swapped_in']:,} in"),
        ("admissions put off", f"{result['admissions_without_space']:,} for lack of blocks"),
        ("time per request", f"p50 {times['p50']:.1f} us, p99 {times['p99']:.1f} us"),
        ("run time", f"{result['seconds']:.1f} s, {result['steps']:,} steps"),
        ("peak memory", f"{result['peak_memory_mib']:.0f} MiB"),
        ("check", result["check"]),
    ]  # fmt: skip
    if result["simulated_seconds"] is not None:
        rows.insert(-3, ("simulated time", f"{result['simulated_seconds']:,.1f} s"))
    if result["requests_too_long"]:
        rows.insert(1, ("refused", f"{result['requests_too_long']:,} longer than the device tier"))
    if result["verified_blocks"] is not None:
        rows.insert(-1, ("verified", f"{result['verified_blocks']:,} block reads held the right content"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _per_hit(result: dict[str, Any]) -> str:
    ratio = result["swapped_out_per_host_hit"]
    return "" if ratio is None else f" ({ratio:.1f} for each that was hit on the host)"
