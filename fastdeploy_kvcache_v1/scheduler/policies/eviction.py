"""EvictionOrder: the order in which the runs of a tier are evicted. Users choose one with `--eviction-policy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge
from math import inf
from operator import itemgetter

from ...config import KVCacheConfig, one_of
from ...contract.flags import Flag
from ..reuse.history import ENDED, NUM_CLASSES, ReuseHistory
from ..reuse.rates import AGE_CLASSES, AGE_WIDTHS, NUM_AGES
from ..reuse.sessions import Session
from ..run import QueueNode, Run, RunQueue

COMPARISONS = 4
"""Times that all queues are compared while an LRU cache of this size would replace its content once, at least."""

CAUTION = 2.0
"""The youngest host copy stands for its queue only if it is worth so many times less than others."""

LOOKED_AT = 8
"""Runs at the young end of a queue among which one without children is searched."""


class EvictionOrder:
    """The order of one tier. `KVCacheConfig.device_eviction` and `host_eviction` choose it by name.

    `Residency` calls `enter` and `use`, asks for the first run, and takes it if it can leave: no users, no runs below
    it, no open copy. So no order can break the tree. `Residency` removes a run that cannot leave and enters it again
    later, so a search costs O(1) amortized.

    An order sees the *place* of a run in its tier: the `Run` itself on the device, its `HostCopy` on the host. A place
    is in at most one queue. `Residency` may move it to a queue of its own without notice. Every method costs O(1);
    `candidates` costs O(1) per run.

    This class is LRU, with one queue, oldest first. When a request ends, `use` is called from its last run up to its
    first, so the queue has leaves first. Other orders override methods.
    """

    learns = False
    """True: needs `ReuseHistory` for `Run.use_class` and `Run.last_use`, which costs time and memory."""

    def __init__(self, num_queues: int = 1) -> None:
        self.queues = [RunQueue() for _ in range(num_queues)]

    def enter(self, place: QueueNode, /, *, first: bool = False) -> None:
        """Add an unused run that is in no queue. `first`: it had to wait, so it leaves before runs of equal worth."""
        (self.queues[0].put_oldest if first else self.queues[0].touch)(place)

    def use(self, place: QueueNode, /) -> None:
        """Record that a request that used the run has ended, and queue it. Other requests may still use it."""
        self.queues[0].touch(place)

    def first(self) -> Run | None:
        """Return the run to evict first, or None. Asked again, it returns the same one until that is moved."""
        return self.queues[0].oldest()

    def candidates(self) -> Iterator[Run]:
        """Yield runs in eviction order. The caller may remove or move the run just yielded."""
        return iter(self.queues[0])

    def worth(self, run: Run, /) -> float:
        """Return the value of keeping `run`, for comparison with other runs. Here all are equal."""
        return 0.0

    def never_returns(self, run: Run, /) -> bool:
        """True if a copy of `run` is not worth making even where there is room."""
        return False


class Adaptive(EvictionOrder):
    """Evicts the run that is least likely to be used again soon, as `ReuseHistory` has learned or clients have told.

    Each class of `ReuseHistory` has a queue in order of last use. Its oldest and its youngest run stand for it, because
    worth falls with age in some classes and rises in others: nothing comes back within its own pause. Ended sessions
    leave first, as long as no other session uses their blocks. Sessions with a told time of return are queued by the
    length of their wait, in half octaves, and the longest wait stands for all. Waits get shorter meanwhile: a run is
    moved when it is looked at.

    While `Judge` prefers recency, the run used longest ago is evicted; ended sessions still leave first.
    """

    learns = True

    def __init__(self, history: ReuseHistory) -> None:
        super().__init__(NUM_CLASSES + NUM_AGES)
        self._history = history
        self._classes, self._told = self.queues[:NUM_CLASSES], self.queues[NUM_CLASSES:]
        self._ended = self._classes[ENDED].end
        self._waits = 0
        """A bit for each queue of `_told` that may have places."""
        self._best: RunQueue | None = None
        """The queue that was worth least. Its runs are evicted as long as they are worth at most `_limit`."""
        self._limit = 0.0
        """The least worth of what stands for other queues."""
        self._stands: Callable[[RunQueue], Run | None] = RunQueue.oldest
        """Returns the run that stands for that queue: the oldest one or the youngest one."""
        self._valid_until = 0
        """Time at which all queues are compared again: worths fall with age."""

    def worth(self, run: Run) -> float:
        return self._history.worth(run)

    def never_returns(self, run: Run) -> bool:
        return run.use_class == ENDED and self._history.ended_first

    def enter(self, place: QueueNode, /, *, first: bool = False) -> None:
        run = place.run
        if run.last_use < 0:  # loaded from storage or a peer
            run.last_use = self._history.now
        if first:
            self._queue(run).put_oldest(place)
            self._limit = min(self._limit, self._history.worth(run))
        else:
            self.use(place)

    def use(self, place: QueueNode, /) -> None:
        run = place.run
        owner = run.owner
        queue = self._classes[run.use_class] if owner is None or owner.due is None else self._queue(run)
        end = queue.end
        if end.older is end:
            self._limit = min(self._limit, self._history.worth(run))
        queue.touch(place)

    def _queue(self, run: Run) -> RunQueue:
        owner = run.owner
        if owner is None or owner.due is None:
            return self._classes[run.use_class]
        wait = max(0, owner.due - self._history.now)
        number = AGE_CLASSES[(wait * wait).bit_length()]
        self._waits |= 1 << number
        return self._told[number]

    def candidates(self) -> Iterator[Run]:
        before = None
        while (first := self.first()) is not None and first is not before:
            yield first  # usually no second one is needed
            before = first
        if before is not None:  # it stays: all others follow in order
            lines = [((self.worth(run), run.last_use, run) for run in queue) for queue in self.queues]
            for _, _, run in merge(*lines, key=itemgetter(0, 1)):
                if run is not before:
                    yield run

    def first(self) -> Run | None:
        history, ended = self._history, self._ended
        if ended.younger is not ended and history.ended_first:
            return self._classes[ENDED].oldest()
        if not history.judge.trusts:
            return self._used_longest_ago()
        if history.now >= self._valid_until:
            self._valid_until = history.now + max(AGE_WIDTHS[0], history.lru_age // COMPARISONS)
            self._move_overdue()
        elif self._best is not None:
            run = self._stands(self._best)
            if run is not None and history.worth(run) <= self._limit:
                return run
        return self._choose()

    def _used_longest_ago(self) -> Run | None:
        found, least = None, inf
        for queue in self.queues if self._waits else self._classes:
            end = queue.end
            place = end.younger
            assert place is not None
            if place is not end and (run := place.run).last_use < least:
                found, least = run, run.last_use
        return found

    def _choose(self) -> Run | None:
        """Compare what stands for each queue, and remember the best queue."""
        history, first, limit = self._history, self._last_told(), inf
        now, least = history.now, inf if first is None else history.worth(first)
        self._best = None
        for queue, worths in zip(self._classes, history.worths, strict=True):
            end = queue.end
            oldest, youngest = end.younger, end.older
            if oldest is end:
                continue
            assert oldest is not None and youngest is not None
            run = oldest.run
            age = now - run.last_use
            value = worths[AGE_CLASSES[(age * age).bit_length()]]
            if value < least:
                first, least, limit, self._best, self._stands = run, value, least, queue, RunQueue.oldest
            elif value < limit:
                limit = value
            if youngest is oldest:
                continue
            age = now - youngest.run.last_use
            value = worths[AGE_CLASSES[(age * age).bit_length()]]
            if youngest is not youngest.run:  # a host copy, which was just made
                value *= CAUTION
            if value < least and (young := _youngest(queue)) is not None:
                first, least, limit, self._best, self._stands = young, value, least, queue, _youngest
            elif value < limit:
                limit = value
        self._limit = limit
        return first

    def _last_told(self) -> Run | None:
        """Return the run whose told return is farthest."""
        while self._waits:
            number = self._waits.bit_length() - 1
            end = self._told[number].end
            place = end.younger
            assert place is not None
            if place is end:
                self._waits &= ~(1 << number)
            elif (queue := self._queue(place.run)) is self._told[number]:
                return place.run
            else:  # its wait is shorter by now, or not told any more
                queue.touch(place)
        return None

    def _move_overdue(self) -> None:
        """Queue the runs of overdue sessions by their classes. Looks no further than the oldest run of each queue."""
        for number in range(self._waits.bit_length()):
            end = self._told[number].end
            while (place := end.younger) is not end:
                assert place is not None
                owner = place.run.owner
                if isinstance(owner, Session) and owner.due is not None and not self._history.is_overdue(owner):
                    break
                self._queue(place.run).touch(place)


def _youngest(queue: RunQueue) -> Run | None:
    """Return the youngest run that can leave, among the first few."""
    place = queue.end.older
    for _ in range(LOOKED_AT):
        assert place is not None
        if place is queue.end:
            break
        run = place.run
        if not run.pins and not run.children:
            return run
        place = place.older
    return None


EVICTION_POLICIES: dict[str, Callable[[ReuseHistory], EvictionOrder]] = {
    "adaptive": Adaptive,
    "lru": lambda history: EvictionOrder(),
}
"""Orders by name. To add one, add a line here and a class above."""


def eviction_order(name: str, history: ReuseHistory) -> EvictionOrder:
    """Make an order by its name. Raises `ConfigError` for an unknown one."""
    return EVICTION_POLICIES[one_of("eviction_policy", EVICTION_POLICIES, name)](history)


EVICTION_POLICY = Flag(
    "eviction_policy",
    "which block is evicted first",
    default=KVCacheConfig.eviction_policy,
    group="cache",
    unit="NAME",
    choices=EVICTION_POLICIES,
    fastdeploy="added",
)
