"""The `replay` command: options, progress, and the table at the end."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from ..config import HELP, KVCacheConfig, WritePolicy
from ..errors import ConfigError
from ..scheduler.policies.tables import EVICTION_POLICIES
from .closed_loop import ClosedLoop
from .driver import Replay, ReplayOptions, peak_memory_bytes
from .trace import read_trace

TOKENS_PER_ID_HELP = "tokens that a hash id of the trace stands for (as follows from its lines)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="request trace, JSONL: Mooncake's, Qwen-Bailian's, or recorded")
    parser.add_argument(
        "--block-size",
        type=int,
        default=KVCacheConfig.block_size,
        help=f"{HELP['block_size']}, a divisor or a multiple of what a hash id stands for (%(default)s)",
    )
    parser.add_argument("--tokens-per-id", type=int, metavar="TOKENS", help=TOKENS_PER_ID_HELP)
    parser.add_argument("--device-blocks", type=int, default=20_000, help="device tier (%(default)s)")
    parser.add_argument("--host-blocks", type=int, default=80_000, help="host tier; 0: none (%(default)s)")
    parser.add_argument(
        "--write-policy",
        default=KVCacheConfig.write_policy.value,
        metavar="POLICY",
        help=f"{HELP['write_policy']} (%(default)s)",
    )
    parser.add_argument(
        "--write-through-threshold",
        type=int,
        default=KVCacheConfig.write_through_threshold,
        metavar="HITS",
        help=f"{HELP['write_through_threshold']} (%(default)s)",
    )
    parser.add_argument(
        "--eviction-policy",
        default=KVCacheConfig.device_eviction,
        metavar="POLICY",
        help=f"which block leaves a tier first: {', '.join(EVICTION_POLICIES)} (%(default)s)",
    )
    parser.add_argument("--window", type=int, default=32, help="requests open at once (%(default)s)")
    parser.add_argument("--admissions-per-step", type=int, default=8, help="requests per step (%(default)s)")
    parser.add_argument(
        "--waiting", type=int, default=0, help="requests that wait and are known to the cache (%(default)s)"
    )
    parser.add_argument(
        "--closed-loop",
        action="store_true",
        help="later turns of a session arrive after the end of the turn before, in simulated time",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=ReplayOptions.step_ms,
        help="simulated time of a step, one output token of every open request (%(default)s)",
    )
    parser.add_argument("--limit", type=int, help="play only the first N requests")
    parser.add_argument(
        "--outputs", action=argparse.BooleanOptionalAction, default=False, help="also cache generated blocks (no)"
    )
    parser.add_argument("--verify", action="store_true", help="check every block's content with a shadow data plane")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def options_from(args: argparse.Namespace) -> ReplayOptions:
    """Raises `ConfigError` for a value that cannot work."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    config = KVCacheConfig(
        num_device_blocks=args.device_blocks,
        num_host_blocks=args.host_blocks,
        block_size=args.block_size,
        write_policy=WritePolicy.parse(args.write_policy),
        write_through_threshold=args.write_through_threshold,
        device_eviction=args.eviction_policy,
        host_eviction=args.eviction_policy,
        max_queued_events=0,
    )
    return ReplayOptions(
        config=config,
        window=args.window,
        admissions_per_step=args.admissions_per_step,
        waiting=args.waiting,
        outputs=args.outputs,
        verify=args.verify,
        closed_loop=args.closed_loop,
        step_ms=args.step_ms,
    )


def run(args: argparse.Namespace) -> int:
    """Play the trace and print the result. Raises `KVCacheError` for bad input and for a manager found wrong."""
    options = options_from(args)
    replay = ClosedLoop(options) if options.closed_loop else Replay(options)
    begin = perf_counter()
    requests = read_trace(args.trace, args.limit, tokens_per_id=args.tokens_per_id)
    # tqdm switches itself off when stderr is not a terminal, and then the lines need no counting.
    total = (args.limit or count_lines(args.trace)) if sys.stderr.isatty() else None
    replay.run(iter(tqdm(requests, total=total, unit="request", disable=None, leave=False)))
    result = summary(replay, perf_counter() - begin)
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def count_lines(trace: Path) -> int | None:
    """Lines of a regular file; None for anything else, and for what `read_trace` will complain about."""
    if not trace.is_file():
        return None
    with open(trace, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def summary(replay: Replay, seconds: float) -> dict[str, Any]:
    """The whole result, JSON-ready; times in microseconds, rates as fractions of the input tokens."""
    config = replay.options.config
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
            "eviction_policy": config.device_eviction,
            "window": replay.options.window,
            "admissions_per_step": replay.options.admissions_per_step,
            "waiting": replay.options.waiting,
            "outputs": replay.options.outputs,
            "verify": replay.options.verify,
            "closed_loop": replay.options.closed_loop,
            "step_ms": replay.options.step_ms,
        },
        "requests": len(times),
        "requests_too_long": replay.num_too_long,
        "outputs_cut": replay.num_outputs_cut,
        "reparented_hash_ids": replay.hasher.num_reparented_ids,
        "input_tokens": replay.num_input_tokens,
        "hit_rate": {**hit, "total": hit["device"] + hit["host"]},
        "steps": replay.num_steps,
        "simulated_seconds": replay.now_ms / 1000 if isinstance(replay, ClosedLoop) else None,
        "blocks_swapped_out": replay.num_evict_copies,
        "blocks_swapped_in": replay.num_swap_in_copies,
        "admissions_without_space": replay.num_no_space,
        "manager": asdict(replay.manager.stats()),
        "request_us": {name: 1e6 * percentile(times, share) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "seconds": seconds,
        "peak_memory_mib": peak_memory_bytes() / 2**20,
        "verified_blocks": None if replay.shadow is None else replay.shadow.num_checked_blocks,
        "check": "clean",
    }


def percentile(ordered: list[float], share: float) -> float:
    """Nearest-rank percentile of sorted values; 0 when there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(result: dict[str, Any]) -> str:
    """What a person reads; one fact per line."""
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
        ("swaps", f"{result['blocks_swapped_out']:,} blocks out, {result['blocks_swapped_in']:,} in"),
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
    if result["reparented_hash_ids"]:
        rows.insert(1, ("odd hash ids", f"{result['reparented_hash_ids']:,} seen after different prefixes"))
    if result["verified_blocks"] is not None:
        rows.insert(-1, ("verified", f"{result['verified_blocks']:,} block reads held the right content"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
