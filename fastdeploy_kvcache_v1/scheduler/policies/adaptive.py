"""Adaptive: what traffic says is worth least leaves first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..places import Link
from ..reuse.history import ReuseHistory
from ..reuse.rates import NUM_CLASSES
from ..run import Run
from ..run_queue import RunQueue
from .eviction import EvictionPolicy


class Adaptive(EvictionPolicy):
    """A queue for each class of runs, by how often their blocks were used, in the order of the last use. The next to
    leave is the oldest of one of them: of the least worth, or, while recency rules (see `Judge`), simply the oldest.

    What the waiting line will hit leaves after everything else: its worth is known, not learned.
    """

    learns = True

    def __init__(self, history: ReuseHistory) -> None:
        self._history = history
        self._queues = [RunQueue() for _ in range(NUM_CLASSES)]
        self._expected = RunQueue()
        self._deferred = [RunQueue() for _ in range(NUM_CLASSES)]

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
        worth = self._history.worth
        oldest = []
        for kind, queue in enumerate(self._queues):
            if queue:
                line = iter(queue)
                run = next(line)
                oldest.append((worth(run), run.last_use, kind, run, line))
        while oldest:
            least = min(oldest)
            _, _, kind, run, line = least
            yield run
            oldest.remove(least)
            if (following := next(line, None)) is not None:
                oldest.append((worth(following), following.last_use, kind, following, line))
        yield from self._expected

    def worth(self, run: Run) -> float:
        return self._history.worth(run)

    def queues(self) -> Sequence[RunQueue]:
        return (*self._queues, self._expected, *self._deferred)
