"""Uncached: how many requests are served without the cache, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...telemetry.metrics import counter, source

ATTRIBUTE = "_kvcache_v1_uncached"
"""Of a request: why it was counted."""


_for_reason = partial(counter, "Requests served without the cache, by reason", "uncached_requests", by="reason")


@source("requests without the cache")
@dataclass
class Uncached:
    """The adapter's lock covers it."""

    same_id: int = _for_reason()
    """A live request has their id."""
    tokens: int = _for_reason()
    """Their token ids or what came with them cannot be hashed."""
    items: int = _for_reason()
    """Their images, videos or audios cannot be named; what is before features that come later is cached."""
    failed: int = _for_reason()
    """The match raised."""

    def count(self, task: Any, reason: str) -> None:
        """Once for a request: one that waits is matched again in each batch."""
        if ATTRIBUTE not in vars(task):
            setattr(task, ATTRIBUTE, reason)
            setattr(self, reason, getattr(self, reason) + 1)
