"""Lrfu: least recently or least frequently used, with uses that fade."""

from __future__ import annotations

from math import log2

from ..reuse.history import ReuseHistory
from ..run import Run
from .by_worth import ByWorth
from .hyperbolic import USES

HALF_LIFE = 0.5
"""After so much of the age at which an LRU order of this size would give a block up, its uses count half."""

DOUBLINGS = tuple(log2(uses) for uses in USES)
"""By class."""


class Lrfu(ByWorth):
    """Worth is uses, halved again and again as time goes by since the last one (D. Lee and others, LRFU: a spectrum of
    policies that subsumes the least recently used and least frequently used policies, IEEE Transactions on Computers
    50(12), 2001). Its logarithm is an age: with twice as many uses a block stays for one more half-life.

    In the paper each use fades from its own time on, and the half-life is to be chosen. Here all fade from the last
    use on, so that the oldest run of a class is the one of least worth, and the half-life follows from what the cache
    holds: popularity outlasts that time a little, and nothing for ever.
    """

    def __init__(self, history: ReuseHistory) -> None:
        super().__init__(history, self._worth_of)

    def _worth_of(self, run: Run) -> float:
        return DOUBLINGS[run.kind] * HALF_LIFE * self._history.lru_age - (self._history.now - run.last_use)
