"""Adaptive: what traffic says is worth least leaves first."""

from __future__ import annotations

from itertools import islice

from ..reuse.history import ReuseHistory
from ..run import Run
from .by_worth import ByWorth

LOOKED_AT = 8
"""Runs at the young end of a queue."""


class Adaptive(ByWorth):
    """Worth is what `ReuseHistory` has learned; while recency rules (see `Judge`), all are worth the same.

    Where blocks come back after a while, as when the same documents are gone through again and again, the youngest
    leaves.
    """

    def __init__(self, history: ReuseHistory) -> None:
        super().__init__(history, history.worth)

    @property
    def recency_rules(self) -> bool:
        return not self._history.rules

    def _first(self) -> Run | None:
        first = super()._first()
        if first is not None:
            for kind in self._history.ripening:
                end = self._ends[kind]
                young = None if end.younger is end else self._youngest_leaf(kind)
                if young is not None and self._worth(young) < self._worth(first):
                    first = young
        return first

    def _youngest_leaf(self, kind: int) -> Run | None:
        """The run of that class that was used last and has none below it in any tier, if it is not far."""
        for run in islice(self._queues[kind].youngest_first(), LOOKED_AT):
            if not run.pins and not run.has_children:
                return run
        return None
