"""Adaptive: what traffic says is worth least leaves first."""

from __future__ import annotations

from itertools import islice

from ..run import Run
from .by_worth import ByWorth

LOOKED_AT = 8
"""Runs at the young end of a queue."""


class Adaptive(ByWorth):
    """Worth is what `ReuseHistory` has learned; while recency rules (see `Judge`), all are worth the same.

    Where blocks come back after a while, as when the same documents are gone through again and again, the youngest
    leaves.
    """

    @property
    def recency_rules(self) -> bool:
        return not self._history.rules

    def worth(self, run: Run) -> float:
        return self._history.worth(run)

    def _first(self) -> Run | None:
        first = super()._first()
        for kind in self._history.ripening:
            young = self._youngest_leaf(kind)
            if young is not None and first is not None and self.worth(young) < self.worth(first):
                first = young
        return first

    def _youngest_leaf(self, kind: int) -> Run | None:
        """The run of that class that was used last and has none below it in any tier, if it is not far."""
        for run in islice(self._queues[kind].youngest_first(), LOOKED_AT):
            if not run.pins and not run.has_children:
                return run
        return None
