"""Claims: how often the times of return that clients told were right, by tenant."""

from __future__ import annotations

from ..cache_stats import Counters

MOST_TENANTS = 4096
REMEMBERED = 256
"""Claims of a tenant after which both counts are halved."""
GRACE = 4
"""Wrong claims that a tenant may make before the share counts."""


class Claims:
    """A tenant is believed as long as at most half of its claims prove wrong. Not thread-safe."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._counts: dict[bytes, tuple[int, int]] = {}
        """Claims, and those among them that proved wrong, by tenant. The tenant that was counted last is the last."""

    def believes(self, tenant: bytes) -> bool:
        claims, wrong = self._counts.get(tenant, (0, 0))
        return wrong <= GRACE or 2 * wrong <= claims

    def count(self, tenant: bytes, claims: int, wrong: int) -> None:
        """Add claims and wrong claims. The end of a session counts when it is told, as wrong if the session comes back,
        and not at all (-1) if its client takes it back. A time of return counts when it has come.
        """
        self._counters.wrong_told_returns += wrong
        before, wrong_before = self._counts.pop(tenant, (0, 0))
        if before >= REMEMBERED:
            before, wrong_before = before // 2, wrong_before // 2
        self._counts[tenant] = max(0, before + claims), wrong_before + wrong
        if len(self._counts) > MOST_TENANTS:
            del self._counts[next(iter(self._counts))]
