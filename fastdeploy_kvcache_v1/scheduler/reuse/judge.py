"""Judge: does what was learned find more than recency alone? If not, recency rules for a while."""

from __future__ import annotations

DECAY = 0.98
"""Per refresh: a comparison looks at the last 50 or so."""
MARGIN = 0.05
"""Recency rules again when what was learned finds so much less, of what recency would find."""
SHORTEST = 8
LONGEST = 512
"""Refreshes for which recency rules; twice as long each time that it is found better."""


class Judge:
    """Compares what requests found with what an LRU order would have held for them, by the ages of watched blocks.

    That estimate leaves out what is in use and what is not committed yet, which may be some per cent. So recency rules
    first, and whenever it rules the estimate is compared with the truth. Not thread-safe.
    """

    def __init__(self) -> None:
        self.trusts = False
        """Rules what was learned?"""
        self._found = self._estimate = 0.0
        self._bias = 1.0
        """What LRU finds, as a share of the estimate."""
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
        if self.trusts:
            self._doubt()
        elif self._refreshes >= self._term:
            self._bias = self._found / self._estimate if self._estimate else 1.0
            self._change()
        self._found *= DECAY
        self._estimate *= DECAY

    def _doubt(self) -> None:
        if self._refreshes < SHORTEST:
            return
        if self._found < (1 - MARGIN) * self._bias * self._estimate:
            self._term = min(LONGEST, 2 * self._term)
            self._change()
        elif self._refreshes % LONGEST == 0:
            self._term = SHORTEST

    def _change(self) -> None:
        self.trusts = not self.trusts
        self._refreshes = 0
        self._found = self._estimate = 0.0
