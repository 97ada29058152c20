"""`fastdeploy-kvcache explain`: why requests missed the cache, and what to change."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence

import msgspec

from ..contract.cache_report import PATH, CacheReport, RequestMiss, missed
from ..contract.plan import PATH as PLAN_PATH
from ..contract.plan import Plan
from ..errors import ConfigError
from .causes import Cause, Seen, causes
from .sizes import told

HEALTHY, WORTH_ACTING, UNREACHABLE = 0, 1, 2

HINTS = {401: "it asks for a key: --api-key KEY", 404: "it is a router, or runs without this cache manager"}
"""By HTTP status."""

TIMEOUT_S = 10.0
ASKED = 8
"""Times that an address is asked for its servers."""

PLAN_TIMEOUT_S, PLAN_PAUSE_S = 300.0, 0.5

SHOWN = 5
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8188", help="address of a server (%(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="as clients send it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--request", metavar="ID", help="explain this request, by the id in its answer")
    which.add_argument("--last", action="store_true", help="explain the last request")
    which.add_argument("--top", type=int, metavar="N", help="list the N requests that missed most tokens")
    which.add_argument("--plan", action="store_true", help="tell what other sizes of the tiers would have hit")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the answer. Returns 0 for a healthy cache, 1 for a cause worth acting on, 2 without an answer."""
    try:
        if args.plan:
            return _print_plan(args)
        servers = [Seen(report) for report in _reports(args)]
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        reason = HINTS.get(getattr(error, "code", 0), getattr(error, "reason", error))
        print(f"fastdeploy-kvcache explain: no answer from {args.url}: {reason}", file=sys.stderr)
        return UNREACHABLE
    _compare(servers)
    if args.request or args.last or args.top:
        rows = _chosen([row for seen in servers for row in seen.report.requests], args)
        print(_json(rows) if args.json else "\n".join(map(_line, rows)))
        return HEALTHY
    found = [(seen, causes(seen)) for seen in servers]
    if args.json:
        print(_json([_summary(seen) | {"causes": [cause._asdict() for cause in each]} for seen, each in found]))
    else:
        for seen, each in found:
            _print(args.url, seen, each)
    return WORTH_ACTING if any(each for _, each in found) else HEALTHY


def _print_plan(args: argparse.Namespace) -> int:
    _require_http(args)
    ends_at = time.monotonic() + PLAN_TIMEOUT_S
    while not (plan := msgspec.json.decode(_get(args, PLAN_PATH), type=Plan)).is_ready:
        if time.monotonic() > ends_at:
            raise OSError(f"the plan is not ready after {PLAN_TIMEOUT_S:.0f} s")
        time.sleep(PLAN_PAUSE_S)
    print(_json(plan) if args.json else f"{args.url}:\n{told(plan)}")
    return UNREACHABLE if plan.failure else HEALTHY


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


# ---- asking


def _get(args: argparse.Namespace, path: str) -> bytes:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    request = urllib.request.Request(args.url.rstrip("/") + path, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read()
        return body


def _reports(args: argparse.Namespace) -> list[CacheReport]:
    """One report of each server behind the address."""
    _require_http(args)
    found: dict[str, CacheReport] = {}
    for _ in range(ASKED):
        report = msgspec.json.decode(_get(args, PATH), type=CacheReport)
        found[report.server] = report
    return list(found.values())


def _require_http(args: argparse.Namespace) -> None:
    if urllib.parse.urlsplit(args.url).scheme not in ("http", "https"):
        raise ConfigError(f"--url must begin with http:// or https://, got {args.url!r}")


def _compare(servers: Sequence[Seen]) -> None:
    for seen in servers:
        others = (row.first for other in servers if other is not seen for row in other.report.requests if row.first)
        seen.computed_elsewhere = frozenset(others)


# ---- telling


def _chosen(rows: Sequence[RequestMiss], args: argparse.Namespace) -> list[RequestMiss]:
    if args.top:
        return sorted(rows, key=lambda row: -row.miss.num_tokens)[: args.top]
    newest = sorted(rows, key=lambda row: row.age_s)
    if args.last:
        return newest[:1]
    chosen = [row for row in newest if row.request_id == args.request or row.request_id.startswith(f"{args.request}_")]
    if not chosen:
        raise ConfigError(f"{args.request} is not among the latest requests of this server")
    return chosen


def _line(row: RequestMiss) -> str:
    miss = row.miss
    line = f"{row.request_id}: {miss.at_token} of {row.prompt_tokens} prompt tokens were hits. "
    line += f"Token {miss.at_token} was missed: {miss.reason.value}."
    if miss.tier_last_held is None or miss.evicted_s_ago is None:
        return line
    line += f" The {miss.tier_last_held.value} tier evicted its block {miss.evicted_s_ago:.0f} s before;"
    return f"{line} {miss.blocks_short} blocks more would have kept it."


def _summary(seen: Seen) -> dict[str, object]:
    shares = {reason: seen.share(rows) for reason, rows in seen.by_reason.items()}
    return {
        "server": seen.report.server,
        "requests": len(seen.report.requests),
        "prompt_tokens": seen.prompt_tokens,
        "hit_share": 1 - missed(seen.report.requests) / seen.prompt_tokens if seen.prompt_tokens else 0.0,
        "missed_share": dict(sorted(shares.items(), key=lambda item: -item[1])),
    }


def _print(url: str, seen: Seen, found: Sequence[Cause]) -> None:
    rows = seen.report.requests
    if not rows:
        print(f"{url}: no request has read the cache yet")
        return
    hits = seen.prompt_tokens - missed(rows)
    print(f"{url} (server {seen.report.server}), last {len(rows)} requests:")
    print(f"  {hits / seen.prompt_tokens:.1%} of {seen.prompt_tokens:,} prompt tokens were hits\n")
    print("What costs most hits:" if found else "Nothing here is worth acting on.")
    for number, cause in enumerate(found[:SHOWN], 1):
        head = f"  {number}. {cause.share:6.1%}  "
        print(_filled(head, f"{cause.name}: {cause.says}"))
        print(_filled(" " * len(head), f"Do: {cause.do}"))
    print("\nMissed prompt tokens, by the reason of the first:")
    for reason, of in sorted(seen.by_reason.items(), key=lambda item: -missed(item[1])):
        print(f"  {seen.share(of):6.1%}  {reason} ({len(of)} requests)")


def _filled(head: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH - len(head), break_on_hyphens=False, break_long_words=False)
    return head + f"\n{' ' * len(head)}".join(lines)
