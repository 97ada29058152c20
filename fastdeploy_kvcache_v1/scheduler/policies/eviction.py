"""EvictionOrder: in which order the runs of a tier are asked to leave it. Users choose one with `--eviction-policy`."""

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
"""Runs at the young end of a queue: one of them, with no run below it in any tier, may leave."""


class EvictionOrder:
    """The order of one tier, and nothing else. `KVCacheConfig.device_eviction` and `host_eviction` choose it by name.

    `Residency` tells it what happens to runs, asks for candidates, and takes the first that can leave; whether one can
    (users, runs below it, open copies) is for `Residency` to say. So prefix closure holds under every order. One that
    cannot is taken out, and put back when that changes, so a search costs O(1) amortized.

    An order sees the *place* of a run in this tier, which names the run: the `Run` itself on the device, its `HostCopy`
    on the host. A place is in one queue or in none; where a run waits for a step, or is known to be wanted, its place
    is in a queue of `Residency`: it leaves the order without a word. Every method costs O(1), `candidates` O(1) for
    each run that it yields.

    This one is LRU: in its one queue the oldest comes first. A request that ends is told of from its last run up to its
    first, so that the queue is leaf-first by itself. Other orders override what they do otherwise.
    """

    learns = False
    """`ReuseHistory` is to be kept for it, for `Run.use_class` and `Run.last_use`: it costs time and memory."""

    def __init__(self, num_queues: int = 1) -> None:
        self.queues = [RunQueue() for _ in range(num_queues)]
        """All that may hold a place of its own."""

    def enter(self, place: QueueNode, /, *, first: bool = False) -> None:
        """The run, which no request uses and which is in no queue, has come into the tier. `first`: it was a candidate
        before, and had to wait for others. It leaves before runs that are worth the same.
        """
        (self.queues[0].put_oldest if first else self.queues[0].touch)(place)

    def use(self, place: QueueNode, /) -> None:
        """A request that used the run has ended; others may still use it. It is queued now, if it was not before."""
        self.queues[0].touch(place)

    def candidates(self) -> Iterator[Run]:
        """Runs in the order in which they should leave. The caller may remove or move the run just yielded."""
        return iter(self.queues[0])

    def worth(self, run: Run, /) -> float:
        """What keeping it earns, to be compared with other runs; all are equal for an order that cannot tell."""
        return 0.0


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

    def enter(self, place: QueueNode, /, *, first: bool = False) -> None:
        run = place.run
        if run.last_use < 0:  # it was loaded, because a request wants it
            run.last_use = self._history.now
        queue = self.queues[run.use_class]
        (queue.put_oldest if first else queue.touch)(place)

    def use(self, place: QueueNode, /) -> None:
        self.queues[place.run.use_class].touch(place)

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
"""By name. A new one is a line here, and a class above."""


def eviction_order(name: str, history: ReuseHistory) -> EvictionOrder:
    """Raises `ConfigError`."""
    return EVICTION_POLICIES[one_of("eviction_policy", EVICTION_POLICIES, name)](history)


EVICTION_POLICY = Flag(
    "eviction_policy",
    "which block the cache gives up first",
    default=KVCacheConfig.eviction_policy,
    group="cache",
    unit="NAME",
    choices=EVICTION_POLICIES,
    fastdeploy="added",
)
