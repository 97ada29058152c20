"""LiveAges: how much of what was used has not been used again yet, by age.

An exponential histogram (M. Datar, A. Gionis, P. Indyk, R. Motwani, Maintaining stream statistics over sliding windows,
SIAM J. Computing 31(6), 2002): spans of time that get twice as long the older they are, at most three of one length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

FIRST_SPAN = 4
"""Requests that the youngest spans cover."""


class LiveAges:
    """Weights by class and span. Time is a count of requests and never runs back. Not thread-safe."""

    def __init__(self, num_classes: int, now: int = 0) -> None:
        self._num_classes = num_classes
        self._starts: list[int] = [now]
        self._weights: list[list[float]] = [[0.0] * num_classes]

    def add(self, now: int, kind: int, weight: float) -> None:
        """It was used at `now`."""
        if now >= self._starts[-1] + FIRST_SPAN:
            self._starts.append(now)
            self._weights.append([0.0] * self._num_classes)
            self._merge()
        self._weights[-1][kind] += weight

    def remove(self, time: int, kind: int, weight: float) -> None:
        """What was used at `time` has been used again, or is not watched any more."""
        span = max(0, bisect_right(self._starts, time) - 1)
        weights = self._weights[span]
        weights[kind] = max(0.0, weights[kind] - weight)

    def spans(self, now: int) -> Iterator[tuple[int, int, Sequence[float]]]:
        """Youngest first: ages between which its uses lie, and the weight of each class."""
        end = now
        for start, weights in zip(reversed(self._starts), reversed(self._weights), strict=True):
            yield now - end, now - start, weights
            end = start

    def age_of(self, now: int, weight: float) -> int:
        """The age below which `weight` lies: how long ago the last one of so many was used that were used last."""
        for young, old, weights in self.spans(now):
            total = sum(weights)
            if total >= weight:
                return young + int((old - young) * weight / total) if total else old
            weight -= total
        return now + 1

    def _merge(self) -> None:
        """Where more than three closed spans are equally long, the two oldest of them become one."""
        starts = self._starts
        last = len(starts) - 1  # still open
        while last >= 4:
            length = self._length(last - 1)
            first = last - 1
            while first > 0 and self._length(first - 1) < 2 * length:
                first -= 1
            if last - first <= 3:
                return
            older, younger = self._weights[first], self._weights[first + 1]
            self._weights[first] = [one + other for one, other in zip(older, younger, strict=True)]
            del starts[first + 1], self._weights[first + 1]
            last = first + 1

    def _length(self, span: int) -> int:
        return self._starts[span + 1] - self._starts[span]
