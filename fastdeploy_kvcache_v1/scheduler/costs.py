"""PrefillCosts: the measured time to compute a part of a prompt. Not thread-safe.

Blocks on the host are always loaded, because swap-ins run while the batch computes. A request waits for a store before
it computes, so `storage/engine/store_costs.py` compares loading with these costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..contract.messages import PrefillTime, positions

KEPT_SHARE = 0.8
"""Weight of earlier measurements, applied at each new one."""

LEAST_SPREAD = 1e-3
"""Least share of independent information in the second term (0 to 1) that tells the two terms apart."""

FEWEST_TOKENS = 64
"""Smaller passes are ignored: their fixed cost hides the cost per token."""


class TwoTermFit:
    """`seconds = per_first * first + per_second * second`, neither below 0: least squares with exponential forgetting.

    Errors are relative to `first`, so that short measurements count as much as long ones. Until measurements tell the
    two terms apart, the whole time is assigned to `first`.
    """

    def __init__(self) -> None:
        self._aa = self._ab = self._bb = self._ay = self._by = 0.0
        self._per_first = self._per_second = 0.0

    @property
    def is_known(self) -> bool:
        return self._aa > 0

    def measured(self, first: float, second: float, seconds: float) -> None:
        """Add a measurement. `first` must be above 0."""
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
        return self._per_first * first + self._per_second * second


class PrefillCosts:
    """Fits the cost per token, and the cost per token and token before it."""

    def __init__(self) -> None:
        self._fit = TwoTermFit()

    def computed(self, prefill: PrefillTime) -> None:
        """Record a forward pass that ended on every rank. Passes of few tokens are ignored."""
        if prefill.num_tokens >= FEWEST_TOKENS and prefill.seconds > 0:
            self._fit.measured(*prefill)

    def computed_by_rank(self, prefills: Mapping[int, Sequence[PrefillTime]]) -> None:
        """Record passes as each rank measured them. The slowest rank counts, because ranks wait for each other."""
        told = [passes for passes in prefills.values() if passes]
        for prefill in max(told, key=_seconds_per_token, default=()):
            self.computed(prefill)

    def seconds(self, start: int, end: int) -> float | None:
        """Predict the seconds to compute tokens `[start, end)` of a prompt; None before the first measurement."""
        return self._fit.value(end - start, positions(start, end)) if self._fit.is_known else None


def _seconds_per_token(prefills: Sequence[PrefillTime]) -> float:
    return sum(each.seconds for each in prefills) / max(1, sum(each.num_tokens for each in prefills))
