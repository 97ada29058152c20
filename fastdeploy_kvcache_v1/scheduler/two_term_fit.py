"""TwoTermFit: a time that is a sum of two terms, learned from measurements that come one by one."""

from __future__ import annotations

KEPT_SHARE = 0.8
"""Of what was measured before, at each measurement."""

LEAST_SPREAD = 1e-3
"""Measurements that are more alike cannot tell the two terms apart: 1 if the second one says all that the first does
not, 0 if both say the same.
"""


class TwoTermFit:
    """`seconds = per_first * first + per_second * second`, neither below 0: least squares with exponential forgetting.

    Errors count relative to `first`, so that short measurements count as much as long ones. As long as these do not
    tell the two terms apart, all of it is put down to `first`.
    """

    def __init__(self) -> None:
        self._aa = self._ab = self._bb = self._ay = self._by = 0.0
        self._per_first = self._per_second = 0.0

    @property
    def is_known(self) -> bool:
        """Anything was measured."""
        return self._aa > 0

    def measured(self, first: float, second: float, seconds: float) -> None:
        """`first` must be above 0."""
        second, seconds = second / first, seconds / first
        self._aa = KEPT_SHARE * self._aa + 1.0
        self._ab = KEPT_SHARE * self._ab + second
        self._bb = KEPT_SHARE * self._bb + second * second
        self._ay = KEPT_SHARE * self._ay + seconds
        self._by = KEPT_SHARE * self._by + second * seconds
        self._solve()

    def _solve(self) -> None:
        self._per_first, self._per_second = self._ay / self._aa, 0.0
        spread = self._aa * self._bb - self._ab * self._ab
        if spread <= LEAST_SPREAD * self._aa * self._bb:
            return
        per_second = (self._aa * self._by - self._ab * self._ay) / spread
        if per_second > 0:
            per_first = (self._ay - per_second * self._ab) / self._aa
            self._per_first, self._per_second = (per_first, per_second) if per_first > 0 else (0.0, self._by / self._bb)

    def value(self, first: float, second: float) -> float:
        """Seconds that it takes."""
        return self._per_first * first + self._per_second * second
