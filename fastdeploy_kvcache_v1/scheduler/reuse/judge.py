"""Judge: does what was learned find more than recency alone? If not, recency rules for a while."""

from __future__ import annotations

from math import hypot, sqrt

DECAY = 0.98
"""Per refresh: a comparison looks at the last 50 or so."""
SURE = 1.5
"""Standard errors by which what was learned must find less than recency would, to be doubted."""
LEAST, MOST = 0.01, 0.05
"""What that means at least and at most, of what recency would find: so much less is always doubted, or never."""
SHORTEST = 8
LONGEST = 512
"""Refreshes for which recency rules; twice as long each time that it is found better."""


class Share:
    """What was found, as a share of an estimate, and how far chance may have moved it: a ratio of sums over refreshes,
    and its standard error.
    """

    def __init__(self) -> None:
        self._found = self._estimate = 0.0
        self._squares = self._products = self._estimate_squares = 0.0

    def add(self, found: int, estimate: int) -> None:
        """Those of one refresh. Earlier ones count less from now on."""
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
        """Of itself."""
        value = self.value
        residuals = self._squares - 2 * value * self._products + value * value * self._estimate_squares
        return sqrt(max(0.0, residuals)) / self._found if self._found else 0.0


class Judge:
    """Compares what requests found with what an LRU order would have held for them, by the ages of watched blocks.

    That estimate leaves out what is in use and what is not committed yet, which may be some per cent. So recency rules
    first, and whenever it rules the estimate is compared with the truth.
    """

    def __init__(self) -> None:
        self.trusts = False
        """Rules what was learned?"""
        self._found = self._estimate = 0
        """Since the last refresh."""
        self._now, self._lru = Share(), Share()
        """Of the estimate: what is found since the last change, and what recency found when it ruled last."""
        self._term = SHORTEST
        self._refreshes = 0
        """Since the last change."""

    def compare(self, found: int, found_by_lru: int) -> None:
        """Blocks that a request found, and what the estimate for LRU says."""
        self._found += found
        self._estimate += found_by_lru

    def refresh(self) -> None:
        """Decide again. To be called while blocks are evicted: otherwise all orders are equal."""
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
