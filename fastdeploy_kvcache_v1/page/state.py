"""The page at `/debug/cache` of both servers, and its data: the latest requests, causes, tiers, blocks and metrics.

Page and data have no text, token, hash or salt. The page needs no other file and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import msgspec

from .. import __version__
from ..contract.cache_report import CacheReport, missed
from ..explain.causes import Seen, causes
from ..telemetry.drawing import STYLE

PAGE_PATH = "/debug/cache"
STATE_PATH = "/v1/cache/state"
"""Below /v1, which FastDeploy's API keys guard."""

HEADERS = MappingProxyType(
    {
        "cache-control": "no-cache",
        "content-security-policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)

SHOWN = 32
"""Requests in the data, the latest."""


@cache
def document() -> str:
    """The page, in HTML."""
    return (files(__package__) / "page.html").read_text("utf-8").replace("/* colours */", STYLE)


def state(report: CacheReport, snapshot: object, times: Sequence[Any] = ()) -> dict[str, Any]:
    """Make the data of the page, as values of JSON. It takes a millisecond.

    `snapshot`: the cache's. `times`: named tuples with the seconds of the latest requests, where the server knows them.
    """
    seen = Seen(report)
    shown = {
        "version": __version__,
        "report": msgspec.structs.replace(report, requests=report.requests[-SHOWN:], metrics={}),
        "num_requests": len(report.requests),
        "prompt_tokens": seen.prompt_tokens,
        "missed_tokens": {reason: missed(rows) for reason, rows in seen.by_reason.items()},
        "causes": [cause._asdict() for cause in causes(seen)],
        "block_bytes": report.block_bytes,
        "metrics": report.metrics,
        "cache": snapshot,
        "times": [each._asdict() for each in times],
    }
    made: dict[str, Any] = msgspec.to_builtins(shown)
    return made
