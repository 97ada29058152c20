"""LeastRecentlyUsed: the run that has been left alone for the longest time leaves first."""

from __future__ import annotations

from collections.abc import Sequence

from ..places import Link, RunQueue
from .order import EvictionOrder


class LeastRecentlyUsed(RunQueue, EvictionOrder):
    """The order is one queue, oldest first, which is the order itself: most events are one operation of it.

    A request that ends is told of from its last run up to its first, so that the queue is leaf-first by itself.
    """

    def enter(self, place: Link, /, *, first: bool = False) -> None:
        (self.put_oldest if first else self.touch)(place)

    use = RunQueue.touch
    candidates = RunQueue.__iter__

    def queues(self) -> Sequence[RunQueue]:
        return (self,)
