"""SlowestFit: a time that each tensor-parallel rank measures for itself, and that all of them wait for."""

from __future__ import annotations

from .two_term_fit import TwoTermFit


class SlowestFit:
    """A `TwoTermFit` for each rank that has measured anything; the slowest one counts. Which one that is may depend on
    what is asked: one rank may be slow to begin, another one slow to go on. O(ranks) time and memory.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._by_rank: dict[int, TwoTermFit] = {}

    @property
    def is_known(self) -> bool:
        """Any rank has measured anything."""
        return bool(self._by_rank)

    def measured(self, rank: int, first: float, second: float, seconds: float) -> None:
        """See `TwoTermFit.measured`."""
        self._by_rank.setdefault(rank, TwoTermFit()).measured(first, second, seconds)

    def value(self, first: float, second: float) -> float:
        """Seconds that it takes all ranks. Something must be known."""
        return max([fit.value(first, second) for fit in self._by_rank.values()])

    def value_of(self, rank: int, first: float, second: float) -> float | None:
        """Seconds that it takes `rank`, None if that has measured nothing."""
        fit = self._by_rank.get(rank)
        return None if fit is None else fit.value(first, second)

    def forget(self, rank: int) -> None:
        """Nothing that `rank` has measured counts any more."""
        self._by_rank.pop(rank, None)
