"""Hyperbolic: what was used least often, for its age, leaves first."""

from __future__ import annotations

from ..reuse.history import ReuseHistory
from ..reuse.rates import CLASSES, NUM_CLASSES
from ..run import Run
from .by_worth import ByWorth

USES = tuple(1 + CLASSES.index(kind) for kind in range(NUM_CLASSES))
"""By class: the fewest uses of a block of it, the one that computed it included."""


class Hyperbolic(ByWorth):
    """Worth is uses divided by age (A. Blankstein, S. Sen, M. J. Freedman, Hyperbolic caching: flexible caching for web
    applications, USENIX ATC 2017). It falls with time, so what was popular once is given up in the end, and there is
    nothing to tune.

    Age is counted in requests since the last use, not since the block came: so the oldest run of a class is the one of
    least worth, and the paper's sample of candidates is not needed.
    """

    def __init__(self, history: ReuseHistory) -> None:
        super().__init__(history, self._worth_of)

    def _worth_of(self, run: Run) -> float:
        return USES[run.kind] / (1 + self._history.now - run.last_use)
