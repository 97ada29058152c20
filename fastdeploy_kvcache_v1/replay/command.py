"""The `replay` command: options, progress, and the table at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from ..config import HELP, KVCacheConfig, WritePolicy
from ..errors import ConfigError
from .closed_loop import ClosedLoop
from .compare import Capacity, Comparison, comparison_table, policies
from .driver import Replay, ReplayOptions
from .report import summary, table
from .trace import TraceRequest, read_trace

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
    for tier, text, default in (("device", "device tier", "20000"), ("host", "host tier; 0: none", "80000")):
        parser.add_argument(
            f"--{tier}-blocks", type=counts, default=counts(default), metavar="N", help=f"{text} ({default})"
        )
    parser.add_argument(
        "--made-with",
        type=int,
        metavar="N",
        help="make the manager with N device blocks, and resize it before the first request, as FastDeploy does when "
        "profiling has found its size (made with its size)",
    )
    parser.add_argument(
        "--write-policy",
        metavar="POLICY",
        help=HELP["write_policy"],
    )
    parser.add_argument(
        "--write-through-threshold",
        type=int,
        metavar="HITS",
        help=HELP["write_through_threshold"],
    )
    parser.add_argument(
        "--eviction-policy",
        default=KVCacheConfig.eviction_policy,
        metavar="NAME",
        help=f"{HELP['eviction_policy']} (%(default)s)",
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
    parser.add_argument(
        "--compare",
        action="store_true",
        help="play every policy, at every size of --device-blocks and --host-blocks (several, by commas)",
    )
    parser.add_argument("--policies", metavar="NAMES", help="compare only these write and eviction policies")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(int(part) for part in text.split(","))


def options_from(args: argparse.Namespace) -> ReplayOptions:
    """How to play the trace, at the first of the given sizes. Raises `ConfigError` for a value that cannot work."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    threshold = args.write_through_threshold
    config = KVCacheConfig(
        num_device_blocks=args.device_blocks[0],
        num_host_blocks=args.host_blocks[0],
        block_size=args.block_size,
        write_policy=WritePolicy.chosen(args.write_policy, threshold),
        write_through_threshold=KVCacheConfig.write_through_threshold if threshold is None else threshold,
        eviction_policy=args.eviction_policy,
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
        made_with=args.made_with,
    )


def run(args: argparse.Namespace) -> int:
    """Play the trace and print the result. Raises `KVCacheError` for bad input and for a manager found wrong."""
    options = options_from(args)
    requests = read_trace(args.trace, args.limit, tokens_per_id=args.tokens_per_id)
    if args.compare:
        comparison = _compare(args, options, requests)
        print(json.dumps(comparison, indent=2) if args.json else comparison_table(comparison))
        return 0
    for flag, given in (("--device-blocks", args.device_blocks), ("--host-blocks", args.host_blocks)):
        if len(given) > 1:
            raise ConfigError(f"{flag} takes several numbers with --compare only, got {','.join(map(str, given))}")
    if args.policies is not None:
        raise ConfigError("--policies needs --compare: otherwise use --write-policy and --eviction-policy")
    replay = ClosedLoop(options) if options.closed_loop else Replay(options)
    begin = perf_counter()
    # tqdm switches itself off when stderr is not a terminal, and then the lines need no counting.
    total = (args.limit or count_lines(args.trace)) if sys.stderr.isatty() else None
    replay.run(iter(tqdm(requests, total=total, unit="request", disable=None, leave=False)))
    result = summary(replay, perf_counter() - begin)
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def _compare(args: argparse.Namespace, options: ReplayOptions, requests: Iterator[TraceRequest]) -> dict[str, Any]:
    for flag, given, default in (
        ("--write-policy", args.write_policy, None),
        ("--eviction-policy", args.eviction_policy, KVCacheConfig.eviction_policy),
    ):
        if given != default:
            raise ConfigError(f"{flag} {given}: --compare plays every policy; choose among them with --policies")
    comparison = Comparison(list(requests), options, *policies(args.policies))
    capacities = [Capacity(device, host) for device in args.device_blocks for host in args.host_blocks]
    return comparison.run(capacities)


def count_lines(trace: Path) -> int | None:
    """Lines of a regular file; None for anything else, and for what `read_trace` will complain about."""
    if not trace.is_file():
        return None
    with open(trace, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
