"""The `bench serve` command: options, both runs, and the comparison of their tokens."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

from tqdm import tqdm

from ..errors import ConfigError
from ..replay.trace import read_trace
from .report import Answer, differences, failures, report, table, verdict
from .server_process import running_server
from .session import Session, Turn, longest_prompt, num_requests, poisson, random_tokens
from .trace_workload import Scale, scaled
from .workloads import WORKLOADS, Size

CACHE_ON, CACHE_OFF = "cache on", "cache off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        default="chat",
        help="questions about documents, conversations, or agents with shared instructions (%(default)s)",
    )
    source.add_argument("--trace", type=Path, help="a request trace instead, JSONL as for `replay`")
    parser.add_argument(
        "--tokens-per-id", type=int, metavar="TOKENS", help="that a hash id of the trace stands for (as its lines say)"
    )
    parser.add_argument("--url", help="running server with the cache on, like http://127.0.0.1:8000")
    parser.add_argument("--url-off", help="running server with the cache off, to compare with --url")
    parser.add_argument("--requests", type=int, default=100, help="send so many, in whole sessions (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=2_000, help="longest prompt (%(default)s)")
    parser.add_argument("--max-output-tokens", type=int, default=16, help="longest output (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions under way at once (%(default)s)")
    parser.add_argument("--rate", type=float, help="sessions that begin per second, at random (as fast as possible)")
    parser.add_argument("--divide", type=int, default=8, help="divide a trace's lengths by this (%(default)s)")
    parser.add_argument("--speedup", type=float, help="send a trace at this many times its pace (as fast as possible)")
    parser.add_argument("--seed", type=int, default=0, help="of workload and arrivals (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="seeded per request (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "serve_arguments", nargs="*", metavar="-- SERVE_FLAGS", help="flags for the servers started without --url"
    )


@dataclass(frozen=True)
class Target:
    """One server to measure; without a URL, `serve_arguments` start one."""

    name: str
    url: str | None
    serve_arguments: tuple[str, ...] = ()


def run(args: argparse.Namespace) -> int:
    """0 when every request was answered and both servers gave the same tokens; 1 otherwise."""
    targets = _targets(args)
    sessions = _sessions(args)
    runs = {target.name: _play(target, sessions, args) for target in targets}
    reports = {name: report(answers, seconds) for name, (answers, seconds) in runs.items()}
    problems = [line for name, (answers, _) in runs.items() for line in failures(name, answers)]
    result = {
        "workload": args.workload if args.trace is None else str(args.trace),
        "requests": num_requests(sessions),
        "runs": reports,
        "compared": len(runs) == 2,
    }
    if len(runs) == 2:
        problems += differences(runs[CACHE_ON][0], runs[CACHE_OFF][0])
        if not problems:
            result["verdict"] = verdict(reports[CACHE_ON], reports[CACHE_OFF])
    result["problems"] = problems
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 1 if problems else 0


def _sessions(args: argparse.Namespace) -> list[Session]:
    """What is sent. Raises `ConfigError` for options that cannot work, `TraceError` for a broken trace."""
    for flag in ("requests", "concurrency", "max_prompt_tokens", "max_output_tokens"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(args, flag)}")
    for flag in ("rate", "speedup"):
        if getattr(args, flag) is not None and not getattr(args, flag) > 0:
            raise ConfigError(f"--{flag} must be more than 0, got {getattr(args, flag)}")
    if args.rate is not None and args.speedup is not None:
        raise ConfigError("--rate and --speedup exclude each other: a trace has a pace of its own")
    if args.speedup is not None and args.trace is None:
        raise ConfigError("--speedup needs --trace: use --rate for a workload")
    if args.trace is None:
        size = Size(args.requests, args.max_prompt_tokens, args.max_output_tokens, args.seed)
        sessions = WORKLOADS[args.workload](size)
    else:
        scale = Scale(args.divide, args.max_prompt_tokens, args.max_output_tokens, args.speedup or 1.0)
        sessions = scaled(read_trace(args.trace, args.requests, tokens_per_id=args.tokens_per_id), scale)
    return sessions if args.rate is None else poisson(sessions, args.rate, args.seed)


def _targets(args: argparse.Namespace) -> list[Target]:
    """Raises `ConfigError` for a combination of URLs and serve flags that makes no sense."""
    if args.url is None:
        if args.url_off is not None:
            raise ConfigError("--url-off needs --url, the server to compare it with")
        flags = tuple(args.serve_arguments)
        return [Target(CACHE_ON, None, flags), Target(CACHE_OFF, None, (*flags, "--no-enable-prefix-caching"))]
    if args.serve_arguments:
        raise ConfigError("flags after -- are for servers that this command starts: leave them or --url out")
    targets = [Target(CACHE_ON, args.url)]
    if args.url_off is not None:
        targets.append(Target(CACHE_OFF, args.url_off))
    for target in targets:
        parts = urlsplit(target.url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{target.url!r} is not the URL of a server: give one like http://127.0.0.1:8000")
    return targets


def _play(target: Target, sessions: Sequence[Session], args: argparse.Namespace) -> tuple[list[Answer], float]:
    """The sessions sent to one server: answers in order, and the seconds they took together."""
    from .client import Pace, play

    pace = Pace(args.concurrency, keeps_time=args.rate is not None or args.speedup is not None)
    sampling = {"temperature": args.temperature}
    context = nullcontext(target.url.rstrip("/")) if target.url else running_server(target.serve_arguments)
    total = num_requests(sessions)
    with context as url, tqdm(total=total, desc=target.name, disable=None, leave=False) as bar:
        asyncio.run(play(url, [_warm_up(sessions)], pace, sampling, lambda: None))
        begin = perf_counter()
        answers = asyncio.run(play(url, sessions, pace, sampling, bar.update))
        return answers, perf_counter() - begin


def _warm_up(sessions: Sequence[Session]) -> Session:
    """As long as the longest prompt, and equal to none: what is done only once is done before the measurement."""
    return Session("warm-up", (Turn(random_tokens("warm-up", longest_prompt(sessions)), 2),))
