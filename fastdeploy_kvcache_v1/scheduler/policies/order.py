"""EvictionOrder: in which order the runs of a tier are asked to leave it."""

from __future__ import annotations

from collections.abc import Iterator

from ..run import Link, Run, RunQueue


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
    """`ReuseHistory` is to be kept for it, for `Run.kind` and `Run.last_use`: it costs time and memory."""

    def __init__(self, num_queues: int = 1) -> None:
        self.queues = [RunQueue() for _ in range(num_queues)]
        """All that may hold a place of its own."""

    def enter(self, place: Link, /, *, first: bool = False) -> None:
        """The run, which no request uses and which is in no queue, has come into the tier. `first`: it was a candidate
        before, and had to wait for others. It leaves before runs that are worth the same.
        """
        (self.queues[0].put_oldest if first else self.queues[0].touch)(place)

    def use(self, place: Link, /) -> None:
        """A request that used the run has ended; others may still use it. It is queued now, if it was not before."""
        self.queues[0].touch(place)

    def candidates(self) -> Iterator[Run]:
        """Runs in the order in which they should leave. The caller may remove or move the run just yielded."""
        return iter(self.queues[0])

    def worth(self, run: Run, /) -> float:
        """What keeping it earns, to be compared with other runs; all are equal for an order that cannot tell."""
        return 0.0
