"""ByWorth: what is worth least leaves first, where worth follows from how often a block was used and how long ago."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from operator import itemgetter

from ..places import Link
from ..reuse.history import ReuseHistory
from ..reuse.rates import NUM_CLASSES
from ..run import Run
from ..run_queue import RunQueue
from .eviction import EvictionPolicy


class ByWorth(EvictionPolicy):
    """A queue for each class of runs, by how often their blocks were used, in the order of the last use. The next to
    leave is the oldest of one of them: of the least worth, or, of equal ones, simply the oldest.

    What the waiting line will hit leaves after everything else: its worth is known, not guessed.
    """

    learns = True

    def __init__(self, history: ReuseHistory, worth: Callable[[Run], float]) -> None:
        """`worth` of what has a run of a queue's class and its last use."""
        self._history = history
        self._worth = worth
        self._queues = [RunQueue() for _ in range(NUM_CLASSES)]
        self._ends = [queue.end for queue in self._queues]
        self._expected = RunQueue()
        self._deferred = [RunQueue() for _ in range(NUM_CLASSES)]

    @property
    def recency_rules(self) -> bool:
        return False

    def worth(self, run: Run) -> float:
        return self._worth(run)

    def entered(self, place: Link) -> None:
        run = place.run
        if not run.pins:
            if run.last_use < 0:  # it was loaded, because a request wants it
                run.last_use = self._history.now
            self.used(place)

    def used(self, place: Link) -> None:
        self._queues[place.run.kind].touch(place)

    released = used

    def expected(self, place: Link) -> None:
        self._expected.touch(place)

    def nothing_expected(self) -> None:
        while (place := self._expected.pop_oldest()) is not None:
            self.used(place)

    def unblocked(self, place: Link) -> None:
        self._queues[place.run.kind].put_oldest(place)

    cut = staticmethod(RunQueue.insert_after)
    passed_over = joined = removed = staticmethod(RunQueue.discard)

    def deferred(self, place: Link) -> None:
        self._deferred[place.run.kind].touch(place)

    def step_taken(self) -> None:
        for queue, deferred in zip(self._queues, self._deferred, strict=True):
            queue.put_back(deferred)

    def candidates(self) -> Iterator[Run]:
        first = self._first()
        if first is not None:
            yield first  # mostly nobody asks for a second one
            lines = [((self.worth(run), run.last_use, run) for run in queue) for queue in self._queues]
            for _, _, run in merge(*lines, key=itemgetter(0, 1)):
                if run is not first:
                    yield run
        yield from self._expected

    def _first(self) -> Run | None:
        worth = self._worth
        first, least, last_use = None, 0.0, 0
        for end in self._ends:
            link = end.younger
            if link is not end:
                assert link is not None
                run = link.run
                value = worth(run)
                if first is None or value < least or (value == least and run.last_use < last_use):
                    first, least, last_use = run, value, run.last_use
        return first

    def queues(self) -> Sequence[RunQueue]:
        return (*self._queues, self._expected, *self._deferred)
