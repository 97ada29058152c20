"""Where the time of each request went, for `GET /v1/cache/state`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_KEPT = 32
"""Ended requests whose times are kept, the latest."""


@dataclass(slots=True)
class RequestTimes:
    """Seconds of one request, until its first token. Engine thread only."""

    queue_s: float | None = None
    """From its arrival to its first step, without `storage_s`; None while it waits."""
    storage_s: float = 0.0
    """Part of the wait for its first step: until its stored blocks arrived or were given up."""
    copies_s: float = 0.0
    """Its steps waited for copies between host and device."""
    prefill_s: float = 0.0
    """Its steps computed, in batches with other requests."""
    first_token_s: float | None = None
    """From its arrival; None before the first token."""
    held_since: float | None = None
    """Start of the wait for stored blocks, on the engine's clock."""

    def held(self, now: float, *, by_storage: bool) -> None:
        """Note whether a waiting request waits for stored blocks."""
        if by_storage and self.held_since is None:
            self.held_since = now
        elif not by_storage and self.held_since is not None and not self.storage_s:
            self.storage_s = now - self.held_since

    def started(self, waited_s: float) -> None:
        """Note its first step, sent `waited_s` after its arrival."""
        if self.queue_s is None:
            self.queue_s = waited_s - self.storage_s

    def computed(self, seconds: float, copies_s: float) -> None:
        """Note the end of one of its steps."""
        if self.first_token_s is None:
            self.copies_s += copies_s
            self.prefill_s += seconds - copies_s


class RequestReport(NamedTuple):
    """One request for an operator: counts of tokens and seconds, no text and no token."""

    id: str
    state: str
    """`waiting`, `running` and so on; in the end `finished`, `aborted` or `failed`."""
    prompt_tokens: int
    cached_tokens: int | None
    """None before it was admitted."""
    output_tokens: int
    queue_s: float | None
    storage_s: float
    copies_s: float
    prefill_s: float
    first_token_s: float | None
    total_s: float
    """From its arrival to its end, or to now."""
