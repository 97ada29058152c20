"""The `replay` command: options, progress, and the table at the end."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from ...config import KVCacheConfig, WritePolicy
from ...contract.flags import BLOCK_SIZE, WRITE_POLICY, WRITE_THROUGH_THRESHOLD, add_flags
from ...errors import ConfigError
from ...scheduler.policies.eviction import EVICTION_POLICY
from . import curve
from .compare import Capacity, Comparison, comparison_table, policies
from .driver import TOLD, ReplayOptions
from .report import SHOWN_OPTIONS, play, table
from .trace import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def number(flag: str, default: object, text: str, kind: type = int, **more: str) -> None:
        shown = "" if default is None else " (%(default)s)"
        parser.add_argument(flag, type=kind, default=default, help=f"{text}{shown}", **more)  # type: ignore[arg-type]

    def switch(flag: str, text: str) -> None:
        parser.add_argument(flag, action="store_true", help=text)

    parser.add_argument("trace", type=Path, help="request trace, JSONL: Mooncake's, Qwen-Bailian's, or recorded")
    block_size = replace(BLOCK_SIZE, help=f"{BLOCK_SIZE.help}, a divisor or a multiple of the tokens of a hash id")
    add_flags(parser, (block_size, WRITE_POLICY, WRITE_THROUGH_THRESHOLD, EVICTION_POLICY), with_defaults=True)
    hash_id = "tokens of a hash id (default: tokens_per_id of the trace, else 512 or 16 if all lines fit)"
    number("--tokens-per-id", None, hash_id, metavar="TOKENS")
    for tier, text, default in (("device", "in the device tier", "20000"), ("host", "in the host tier", "80000")):
        parser.add_argument(
            f"--{tier}-blocks", type=counts, default=counts(default), metavar="N", help=f"blocks {text} ({default})"
        )
    number("--window", ReplayOptions.window, "open requests", metavar="N")
    number("--admissions-per-step", ReplayOptions.admissions_per_step, "requests admitted per step", metavar="N")
    number(
        "--waiting",
        ReplayOptions.waiting,
        "waiting requests that the cache knows, and whose prefixes it keeps",
        metavar="N",
    )
    switch("--closed-loop", "simulate time: a later turn of a session arrives after the end of the turn before")
    step_ms = "simulated milliseconds of a step, in which each open request gets a token"
    number("--step-ms", ReplayOptions.step_ms, step_ms, float, metavar="MS")
    told = "; ".join(f"{name}: {text}" for name, text in TOLD.items())
    parser.add_argument(
        "--told", type=names, default=(ReplayOptions.told,), metavar="NAME", help=f"what clients tell. {told} (trace)"
    )
    told_error = "told times of return are wrong: multiplied or divided by this factor, at random"
    number("--told-error", ReplayOptions.told_error, told_error, float, metavar="FACTOR")
    number("--limit", None, "play only the first N requests", metavar="N")
    parser.add_argument(
        "--outputs", action=argparse.BooleanOptionalAction, default=False, help="also cache generated blocks (no)"
    )
    switch("--verify", "check the content of each block that a request reads")
    several = "at each size of --device-blocks and --host-blocks, for each of --told (lists with commas)"
    switch("--compare", f"play each policy {several}")
    parser.add_argument(
        "--policies", metavar="NAMES", help="with --compare: only these write and eviction policies, with commas"
    )
    for flag, kind in (("--picture", "as SVG"), ("--html", "on a page with the tables")):
        text = f"with --compare: draw hit rate over size {kind} into this file"
        parser.add_argument(flag, type=Path, metavar="FILE", help=text)
    switch("--json", "print the result as JSON")


def counts(text: str) -> tuple[int, ...]:
    """Integers, separated by commas."""
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Words, separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def options_from(args: argparse.Namespace) -> ReplayOptions:
    """Options for the first of the given sizes. Raises `ConfigError` for a wrong value."""
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
    return ReplayOptions(config, **{name: getattr(args, name) for name in SHOWN_OPTIONS} | {"told": args.told[0]})


def run(args: argparse.Namespace) -> int:
    """Play the trace and print the result. Raises `KVCacheError` for bad input, or a manager with an error."""
    _refuse(args)
    options = options_from(args)
    requests = read_trace(args.trace, args.limit, tokens_per_id=args.tokens_per_id)
    if args.compare:
        played = policies(args.policies)
        capacities = [Capacity(device, host) for device in args.device_blocks for host in args.host_blocks]
        comparison = Comparison(requests, options, *played, args.told)
        if args.picture or args.html:
            curve.check(comparison.most_runs(capacities), len(capacities))
        result, shown = comparison.run(capacities), comparison_table
        if args.picture is not None:
            _write("--picture", args.picture, curve.drawn(result))
        if args.html is not None:
            _write("--html", args.html, curve.page(result))
    else:
        result, shown = play(options, requests, bar=True), table
    print(json.dumps(result, indent=2) if args.json else shown(result))
    return 0


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None


def _refuse(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that exclude each other."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    if args.compare:
        for flag, given, default in (
            ("--write-policy", args.write_policy, None),
            ("--eviction-policy", args.eviction_policy, KVCacheConfig.eviction_policy),
        ):
            if given != default:
                raise ConfigError(f"{flag} {given}: --compare plays every policy; choose among them with --policies")
        return
    for flag in ("device_blocks", "host_blocks", "told"):
        if len(given := getattr(args, flag)) > 1:
            name, values = flag.replace("_", "-"), ",".join(map(str, given))
            raise ConfigError(f"--{name} takes several values with --compare only, got {values}")
    for flag in ("picture", "html"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} needs --compare and several sizes")
    if args.policies is not None:
        raise ConfigError("--policies needs --compare: otherwise use --write-policy and --eviction-policy")
