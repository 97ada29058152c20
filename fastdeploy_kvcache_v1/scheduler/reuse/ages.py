"""LiveAges: how many blocks were last used how long ago.

An exponential histogram (M. Datar, A. Gionis, P. Indyk, R. Motwani, Maintaining stream statistics over sliding windows,
SIAM J. Computing 31(6), 2002). Its spans of time grow with age, to at most half of their age.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

FIRST_SPAN = 1024
"""Ticks that the youngest spans cover."""

MERGED_AT_ONCE = 16
"""Spans added before a merge: merging each time would cost more."""


class LiveAges:
    """Weights (numbers of blocks) by class and span. Time is a count of requests and never runs back."""

    def __init__(self, num_classes: int, now: int = 0) -> None:
        self._num_classes = num_classes
        self._starts: list[int] = [now]
        self._weights: list[list[float]] = [[0.0] * num_classes]
        self._most_spans = MERGED_AT_ONCE

    def young(self, now: int) -> list[float]:
        """Return the weights by class of blocks used at `now`, for the caller to add to."""
        if now >= self._starts[-1] + FIRST_SPAN:
            self._starts.append(now)
            self._weights.append([0.0] * self._num_classes)
            if len(self._starts) > self._most_spans:
                self._merge(now)
        return self._weights[-1]

    def add(self, time: int, use_class: int, weight: float) -> None:
        """Add `weight` last used at `time`, which may be any past time."""
        self._weights[bisect_right(self._starts, time, 1) - 1][use_class] += weight

    def remove(self, time: int, weight: float, *classes: int) -> None:
        """Remove `weight` used at `time` from each of `classes`: used again, or not watched any more."""
        weights = self._weights[bisect_right(self._starts, time, 1) - 1]
        for use_class in classes:
            left = weights[use_class] - weight
            weights[use_class] = left if left > 0 else 0.0

    def spans(self, now: int) -> Iterator[tuple[int, int, Sequence[float]]]:
        """Yield each span, youngest first: its lower and upper age, and the weights by class."""
        end = now
        for start, weights in zip(reversed(self._starts), reversed(self._weights), strict=True):
            yield now - end, now - start, weights
            end = start

    def age_of(self, now: int, column: int, weight: float) -> int:
        """Return the age below which `weight` lies: the age of the last block of an LRU cache of that size."""
        for young, old, weights in self.spans(now):
            total = weights[column]
            if total >= weight:
                return young + int((old - young) * weight / total) if total else old
            weight -= total
        return now + 1

    def _merge(self, now: int) -> None:
        """Merge neighbours that together are short for their age."""
        starts, merged, end = [self._starts[-1]], [self._weights[-1]], now
        for start, weights in zip(self._starts[-2::-1], self._weights[-2::-1], strict=True):
            if 2 * (end - start) <= now - end:
                merged[-1] = [one + other for one, other in zip(merged[-1], weights, strict=True)]
                starts[-1] = start
            else:
                end = starts[-1]
                starts.append(start)
                merged.append(weights)
        self._starts, self._weights = starts[::-1], merged[::-1]
        self._most_spans = len(starts) + MERGED_AT_ONCE
