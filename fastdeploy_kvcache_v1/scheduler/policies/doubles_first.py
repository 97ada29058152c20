"""DoublesFirst: what is on the device as well leaves the host first, where the host tier is short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..places import Link
from ..run import Run
from ..run_queue import RunQueue
from .eviction import EvictionPolicy


class DoublesFirst(EvictionPolicy):
    """An order of the host tier. A run that came back to the device, or was used there, will stay there for a while: of
    these *doubles* the youngest leaves first, then what another order says. A copy that was made because its run is
    about to leave the device is none.

    Nothing is lost with a double, but it is copied again when it leaves the device.
    """

    def __init__(self, order: EvictionPolicy, is_short: Callable[[], bool]) -> None:
        """`is_short`: is what the host may hold twice worth more than the copies?"""
        self._order = order
        self._is_short = is_short
        self._doubles = RunQueue()
        self._places: set[Link] = set()
        """What is in that queue."""
        self.learns = order.learns

    @property
    def recency_rules(self) -> bool:
        return self._order.recency_rules

    @property
    def is_exclusive(self) -> bool:
        return self._is_short()

    def worth(self, run: Run) -> float:
        return self._order.worth(run)

    def entered(self, place: Link) -> None:
        self._order.entered(place)

    def used(self, place: Link) -> None:
        if not self._doubled(place):
            self._order.used(place)

    def released(self, place: Link) -> None:
        if not self._doubled(place):
            self._order.released(place)

    def unblocked(self, place: Link) -> None:
        if not self._doubled(place):
            self._order.unblocked(place)

    def expected(self, place: Link) -> None:
        if place not in self._places:
            self._order.expected(place)

    def nothing_expected(self) -> None:
        self._order.nothing_expected()

    def doubled(self, place: Link) -> None:
        self._doubled(place)

    def is_double(self, place: Link) -> bool:
        return place in self._places

    def only_copy(self, place: Link) -> None:
        if self._ended(place):
            self._order.used(place)

    def deferred(self, place: Link) -> None:
        self._ended(place)
        self._order.deferred(place)

    def step_taken(self) -> None:
        self._order.step_taken()

    def passed_over(self, place: Link) -> None:
        if not self._ended(place):
            self._order.passed_over(place)

    def joined(self, place: Link) -> None:
        if not self._ended(place):
            self._order.joined(place)

    def removed(self, place: Link) -> None:
        if not self._ended(place):
            self._order.removed(place)

    def cut(self, head: Link, place: Link) -> None:
        if place in self._places:
            self._doubles.insert_after(head, place)
            self._places.add(head)
        else:
            self._order.cut(head, place)

    def candidates(self) -> Iterator[Run]:
        yield from self._doubles.youngest_first()
        yield from self._order.candidates()

    def last_copies(self) -> Iterator[Run]:
        return self._order.last_copies()

    def queues(self) -> Sequence[RunQueue]:
        return (*self._order.queues(), self._doubles)

    def cleared(self) -> None:
        self._order.cleared()
        self._doubles.forget()
        self._places.clear()

    def _doubled(self, place: Link) -> bool:
        """Whether it is a double now."""
        if not place.run.on_device or not self._is_short():
            self._ended(place)
            return False
        if place not in self._places:
            self._order.removed(place)
            self._places.add(place)
        self._doubles.touch(place)
        return True

    def _ended(self, place: Link) -> bool:
        """It is none any more, and in no queue if it was one; whether it was."""
        if place not in self._places:
            return False
        self._places.remove(place)
        self._doubles.discard(place)
        return True
