"""LeastRecentlyUsed: the run that has been left alone for the longest time leaves first."""

from __future__ import annotations

from collections.abc import Sequence

from ..places import Link
from ..run_queue import RunQueue
from .eviction import EvictionPolicy


class LeastRecentlyUsed(RunQueue, EvictionPolicy):
    """The order is one queue, oldest first, which is the policy itself: most events are one operation of it.

    A request that ends is told of from its last run up to its first, so that the queue is leaf-first by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deferred = RunQueue()

    def entered(self, place: Link) -> None:
        if not place.run.pins:
            self.touch(place)

    used = released = RunQueue.touch
    unblocked = RunQueue.put_oldest
    cut = staticmethod(RunQueue.insert_after)
    passed_over = joined = removed = staticmethod(RunQueue.discard)
    candidates = RunQueue.__iter__

    def deferred(self, place: Link) -> None:
        self._deferred.touch(place)

    def step_taken(self) -> None:
        self.put_back(self._deferred)

    def queues(self) -> Sequence[RunQueue]:
        return (self, self._deferred)
