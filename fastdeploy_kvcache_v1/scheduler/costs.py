"""Costs: what it takes to compute a prompt, as measured.

What is on the host is always loaded: a batch computes while its swap-ins come in. A store may be slower than computing,
and a request waits for it first; whether that pays is for `storage/engine/store_costs.py` to say. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..contract.messages import PrefillTime, positions

KEPT_SHARE = 0.8
"""Of what was measured before, at each measurement."""

LEAST_SPREAD = 1e-3
"""Measurements that are more alike cannot tell the two terms apart: 1 if the second one says all that the first does
not, 0 if both say the same.
"""

FEWEST_TOKENS = 64
"""Of a pass that says something about the cost of a token: what a pass costs anyway weighs less in larger ones."""


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


class PrefillCosts:
    """Computing costs something per token, and something per token and token before it."""

    def __init__(self) -> None:
        self._fit = TwoTermFit()

    def computed(self, prefill: PrefillTime) -> None:
        """A forward pass ended, on every rank. One that computed few tokens says nothing."""
        if prefill.num_tokens >= FEWEST_TOKENS and prefill.seconds > 0:
            self._fit.measured(*prefill)

    def computed_by_rank(self, prefills: Mapping[int, Sequence[PrefillTime]]) -> None:
        """What passes took on each rank, as each measured it. The slowest one counts: ranks wait for each other."""
        told = [passes for passes in prefills.values() if passes]
        for prefill in max(told, key=_seconds_per_token, default=()):
            self.computed(prefill)

    def seconds(self, start: int, end: int) -> float | None:
        """What tokens `[start, end)` of a prompt take; None until anything was measured."""
        return self._fit.value(end - start, positions(start, end)) if self._fit.is_known else None


def _seconds_per_token(prefills: Sequence[PrefillTime]) -> float:
    return sum(each.seconds for each in prefills) / max(1, sum(each.num_tokens for each in prefills))
