"""Judge: decides whether the learned rates hit more than recency alone. If not, eviction is LRU for a while."""

from __future__ import annotations

from math import hypot, sqrt

DECAY = 0.95
"""Per refresh: a comparison covers about the last 20."""
SURE = 0.7
"""Standard errors by which learned rates must hit less than recency would before recency takes over."""
LEAST, MOST = 0.01, 0.1
"""Bounds of that margin, as a share of the hits of recency."""
SHORTEST = 8
LONGEST = 512
"""Refreshes for which recency rules: doubled, up to `LONGEST`, each time that it proves better."""


class Share:
    """Hits as a share of an estimate: a ratio of sums over refreshes, with its standard error."""

    def __init__(self) -> None:
        self._found = self._estimate = 0.0
        self._squares = self._products = self._estimate_squares = 0.0

    def add(self, found: int, estimate: int) -> None:
        """Add the counts of one refresh. Earlier refreshes count less from now on."""
        self._found = DECAY * self._found + found
        self._estimate = DECAY * self._estimate + estimate
        self._squares = DECAY * self._squares + found * found
        self._products = DECAY * self._products + found * estimate
        self._estimate_squares = DECAY * self._estimate_squares + estimate * estimate

    @property
    def value(self) -> float:
        return self._found / self._estimate if self._estimate else 1.0

    @property
    def error(self) -> float:
        """Standard error as a share of `value`."""
        value = self.value
        residuals = self._squares - 2 * value * self._products + value * value * self._estimate_squares
        return sqrt(max(0.0, residuals)) / self._found if self._found else 0.0


class Judge:
    """Compares the hits of requests with an estimate of the hits of LRU, made from the ages of watched blocks.

    The estimate ignores blocks in use and blocks not committed yet, which can be a few per cent. So recency rules
    first, and while it rules, its real hits calibrate the estimate.
    """

    def __init__(self) -> None:
        self.trusts = False
        """True: eviction follows the learned rates. False: plain recency."""
        self._found = self._estimate = 0
        """Hits since the last refresh, real and estimated."""
        self._now, self._lru = Share(), Share()
        """Hits as a share of the estimate: since the last change, and when recency ruled last."""
        self._term = SHORTEST
        self._refreshes = 0
        """Number of refreshes since the last change."""

    def compare(self, found: int, found_by_lru: int) -> None:
        """Add the blocks that a request hit, and the estimate for LRU."""
        self._found += found
        self._estimate += found_by_lru

    def refresh(self) -> None:
        """Decide again. Call it only while blocks are evicted: otherwise all orders hit the same."""
        self._refreshes += 1
        self._now.add(self._found, self._estimate)
        self._found = self._estimate = 0
        if self.trusts:
            self._doubt()
        elif self._refreshes >= self._term:
            self._lru = self._now
            self._change()

    def _doubt(self) -> None:
        if self._refreshes < SHORTEST:
            return
        margin = min(MOST, max(LEAST, SURE * hypot(self._now.error, self._lru.error)))
        if self._now.value < (1 - margin) * self._lru.value:
            self._term = min(LONGEST, 2 * self._term)
            self._change()
        elif self._refreshes % LONGEST == 0:
            self._term = SHORTEST

    def _change(self) -> None:
        self.trusts = not self.trusts
        self._refreshes = 0
        self._now = Share()
