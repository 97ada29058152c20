"""Uncached: how many requests are served without the cache, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "_kvcache_v1_uncached"
"""Of a request: why it was counted."""


@dataclass
class Uncached:
    """A row of the metric table each. The adapter's lock covers it."""

    same_id: int = 0
    """A live request has their id."""
    tokens: int = 0
    """Their token ids or what came with them cannot be hashed."""
    items: int = 0
    """Their images, videos or audios cannot be named; what is before features that come later is cached."""
    failed: int = 0
    """The match raised."""

    def count(self, task: Any, reason: str) -> None:
        """Once for a request: one that waits is matched again in each batch."""
        if ATTRIBUTE not in vars(task):
            setattr(task, ATTRIBUTE, reason)
            setattr(self, reason, getattr(self, reason) + 1)
