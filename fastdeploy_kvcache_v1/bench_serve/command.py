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
from .report import Answer, differences, failures, report, table
from .server_process import running_server
from .workload import FIRST_TOKEN, Scale, ScaledRequest, scaled

CACHE_ON, CACHE_OFF = "cache on", "cache off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="request trace, Mooncake JSONL")
    parser.add_argument("--url", help="running server with the cache on, like http://127.0.0.1:8000")
    parser.add_argument("--url-off", help="running server with the cache off, to compare with --url")
    parser.add_argument("--requests", type=int, default=100, help="play the first N requests (%(default)s)")
    parser.add_argument("--divide", type=int, default=8, help="divide all lengths by this (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=2_000, help="cut longer prompts (%(default)s)")
    parser.add_argument("--max-output-tokens", type=int, default=16, help="cut longer outputs (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests under way at once (%(default)s)")
    parser.add_argument("--speedup", type=float, help="send at this many times the trace's pace (as fast as possible)")
    parser.add_argument("--temperature", type=float, default=0.0, help="seeded per request (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "serve_arguments", nargs="*", metavar="-- SERVE_FLAGS", help="flags for the servers started without --url"
    )


@dataclass(frozen=True)
class Target:
    """One server to send the trace to; without a URL, `serve_arguments` start one."""

    name: str
    url: str | None
    serve_arguments: tuple[str, ...] = ()


def run(args: argparse.Namespace) -> int:
    """0 when every request was answered and both servers gave the same tokens; 1 otherwise."""
    targets = _targets(args)
    scale = Scale(args.divide, args.max_prompt_tokens, args.max_output_tokens)
    for flag in ("requests", "concurrency"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {getattr(args, flag)}")
    if args.speedup is not None and not args.speedup > 0:
        raise ConfigError(f"--speedup must be more than 0, got {args.speedup}")
    requests = scaled(read_trace(args.trace, args.requests), scale)
    runs = {target.name: _play(target, requests, args) for target in targets}
    reports = {name: report(answers, seconds) for name, (answers, seconds) in runs.items()}
    problems = [line for name, (answers, _) in runs.items() for line in failures(name, answers)]
    if len(runs) == 2:
        problems += differences(runs[CACHE_ON][0], runs[CACHE_OFF][0])
    result = {"requests": len(requests), "runs": reports, "compared": len(runs) == 2, "problems": problems}
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 1 if problems else 0


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


def _play(target: Target, requests: Sequence[ScaledRequest], args: argparse.Namespace) -> tuple[list[Answer], float]:
    """The trace sent to one server: answers in order, and the seconds they took together."""
    try:
        from .client import Pace, send_all
    except ImportError as error:
        raise ConfigError(f"{error}: install the `bench` extra") from error
    pace, sampling = Pace(args.concurrency, args.speedup), {"temperature": args.temperature}
    context = nullcontext(target.url.rstrip("/")) if target.url else running_server(target.serve_arguments)
    with context as url, tqdm(total=len(requests), desc=target.name, disable=None, leave=False) as bar:
        warm_up = [ScaledRequest(0, 0.0, [FIRST_TOKEN] * 8, 2)]
        asyncio.run(send_all(url, warm_up, pace, sampling, lambda: None))
        begin = perf_counter()
        answers = asyncio.run(send_all(url, requests, pace, sampling, bar.update))
        return answers, perf_counter() - begin
