"""EvictionOrder: the order in which the runs of a tier are evicted. Users choose one with `--eviction-policy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter

from ...config import KVCacheConfig, one_of
from ...contract.flags import Flag
from ..reuse.history import ReuseHistory
from ..reuse.rates import NUM_CLASSES
from ..run import QueueNode, Run, RunQueue

LOOKED_AT = 8
"""Runs at the young end of a queue among which one without children is searched."""


class EvictionOrder:
    """The order of one tier. `KVCacheConfig.device_eviction` and `host_eviction` choose it by name.

    `Residency` calls `enter` and `use`, asks for candidates, and takes the first one that can leave: no users, no runs
    below it, no open copy. So no order can break the tree. `Residency` removes a candidate that cannot leave
    and enters it again later, so a search costs O(1) amortized.

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

    def candidates(self) -> Iterator[Run]:
        """Yield runs in eviction order. The caller may remove or move the run just yielded."""
        return iter(self.queues[0])

    def worth(self, run: Run, /) -> float:
        """Return the value of keeping `run`, for comparison with other runs. Here all are equal."""
        return 0.0


class Adaptive(EvictionOrder):
    """Evicts the run that is least likely to be reused soon, as `ReuseHistory` has learned.

    Each use class (how often blocks were used) has a queue in order of last use. The victim is the oldest run of the
    queue whose oldest run is worth least, or the oldest of all if they are equal. In a class whose blocks come back
    only after a while, as when documents are scanned repeatedly, the victim is the youngest run.

    While `Judge` prefers recency, all runs are worth the same.
    """

    learns = True

    def __init__(self, history: ReuseHistory) -> None:
        super().__init__(NUM_CLASSES)
        self._history = history
        self._ends = [queue.end for queue in self.queues]

    def worth(self, run: Run) -> float:
        return self._history.worth(run)

    def enter(self, place: QueueNode, /, *, first: bool = False) -> None:
        run = place.run
        if run.last_use < 0:  # loaded from storage or a peer
            run.last_use = self._history.now
        queue = self.queues[run.use_class]
        (queue.put_oldest if first else queue.touch)(place)

    def use(self, place: QueueNode, /) -> None:
        self.queues[place.run.use_class].touch(place)

    def candidates(self) -> Iterator[Run]:
        first = self._first()
        if first is not None:
            yield first  # usually no second one is needed
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
            for use_class in self._history.ripening:
                youngest = islice(self.queues[use_class].youngest_first(), LOOKED_AT)
                young = next((run for run in youngest if not run.pins and not run.children), None)
                if young is not None and worth(young) < worth(first):
                    first = young
        return first


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
