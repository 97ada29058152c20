"""Adaptive: what traffic says is worth least leaves first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter

from ..reuse.history import ReuseHistory
from ..reuse.rates import NUM_CLASSES
from ..run import Link, Run
from .order import EvictionOrder

LOOKED_AT = 8
"""Runs at the young end of a queue: one of them, with no run below it in any tier, may leave."""


class Adaptive(EvictionOrder):
    """A queue for each class of runs, by how often their blocks were used, in the order of the last use. The next to
    leave is the oldest of one of them: of the least worth, or, of equal ones, simply the oldest. Where blocks come back
    after a while, as when the same documents are gone through again and again, the youngest leaves.

    Worth is what `ReuseHistory` has learned; while recency rules (see `Judge`), all are worth the same.
    """

    learns = True

    def __init__(self, history: ReuseHistory) -> None:
        super().__init__(NUM_CLASSES)
        self._history = history
        self._ends = [queue.end for queue in self.queues]

    def worth(self, run: Run) -> float:
        return self._history.worth(run)

    def enter(self, place: Link, /, *, first: bool = False) -> None:
        run = place.run
        if run.last_use < 0:  # it was loaded, because a request wants it
            run.last_use = self._history.now
        queue = self.queues[run.kind]
        (queue.put_oldest if first else queue.touch)(place)

    def use(self, place: Link, /) -> None:
        self.queues[place.run.kind].touch(place)

    def candidates(self) -> Iterator[Run]:
        first = self._first()
        if first is not None:
            yield first  # mostly nobody asks for a second one
            lines = [((self.worth(run), run.last_use, run) for run in queue) for queue in self.queues]
            for _, _, run in merge(*lines, key=itemgetter(0, 1)):
                if run is not first:
                    yield run

    def _first(self) -> Run | None:
        worth = self._history.worth
        first, least, last_use = None, 0.0, 0
        for end in self._ends:
            link = end.younger
            if link is not end:
                assert link is not None
                run = link.run
                value = worth(run)
                if first is None or value < least or (value == least and run.last_use < last_use):
                    first, least, last_use = run, value, run.last_use
        if first is not None:
            for kind in self._history.ripening:
                youngest = islice(self.queues[kind].youngest_first(), LOOKED_AT)
                young = next((run for run in youngest if not run.pins and not run.children), None)
                if young is not None and worth(young) < worth(first):
                    first = young
        return first
