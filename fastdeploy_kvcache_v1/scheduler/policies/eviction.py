"""EvictionPolicy: in which order the runs of a tier are asked to leave it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from ..places import Link
from ..run import Run
from ..run_queue import RunQueue


class EvictionPolicy(ABC):
    """The order of one tier, and nothing else. `KVCacheConfig.device_eviction` and `host_eviction` choose it by name.

    `Residency` tells the policy what happens to a run. A search for a victim asks the policy for candidates and takes
    the first that can leave; whether one can (users, runs below it, open copies) is for `Residency` to say. So prefix
    closure holds under every policy. A candidate that cannot leave is taken out of the order (`passed_over`,
    `deferred`) and put back when that changes, so a search costs O(1) amortized.

    A policy that wants to know how often a run was used, and when, says so by `learns`, and looks at `Run.kind` and
    `Run.last_use`: `Run.hits` stops where the write policy does not look further.

    A policy sees the *place* of a run in this tier, which names the run: the `Run` itself on the device, its `HostCopy`
    on the host. A place is in one of the policy's queues or in none. Two parts of a run are joined when they are
    neighbours in a queue; the policy learns of every cut and join. Every method costs O(1), `candidates` O(1) for each
    run it yields. Not thread-safe: the manager's lock covers it.
    """

    learns = False
    """`ReuseHistory` is to be kept for it: it costs time and memory."""

    @property
    def recency_rules(self) -> bool:
        """Is the order that of the last use now, whatever else is known?"""
        return True

    @property
    def is_exclusive(self) -> bool:
        """Does its tier hold little that other tiers hold, too?"""
        return False

    @abstractmethod
    def entered(self, place: Link, /) -> None:
        """The run has come into the tier. It is queued now, unless a request uses it: `released` follows then."""

    @abstractmethod
    def used(self, place: Link, /) -> None:
        """A request that used the run has ended; others may still use it. It is queued now, if it was not before."""

    @abstractmethod
    def released(self, place: Link, /) -> None:
        """The last request that used the run has let go of it, and it is in no queue. It is queued now."""

    def expected(self, place: Link, /) -> None:
        """A waiting request will use the run, which is in no use now or out of the way. What is told last is needed
        first, and all of it later than `nothing_expected`.
        """
        self.used(place)

    def nothing_expected(self) -> None:  # noqa: B027
        """What was expected before is not any more."""

    def doubled(self, place: Link, /) -> None:  # noqa: B027
        """The run has been copied to another tier, too."""

    def only_copy(self, place: Link, /) -> None:  # noqa: B027
        """The run was in another tier, too, and has left it."""

    def is_double(self, place: Link, /) -> bool:
        """Whether the run may leave although requests use it: they use it in another tier."""
        return False

    @abstractmethod
    def passed_over(self, place: Link, /) -> None:
        """The run cannot leave: a request uses it, or runs below it must go first. It is in no queue now. `used`,
        `released` or `unblocked` follows, or `removed`.
        """

    @abstractmethod
    def unblocked(self, place: Link, /) -> None:
        """The last run below has left the tier, and this one is in no queue. It is a candidate now, before the others:
        it was one before it had to wait.
        """

    @abstractmethod
    def deferred(self, place: Link, /) -> None:
        """The run cannot leave until the step is taken, because a copy of this step fills or reads it. No candidate
        until `step_taken`, unless it is used before.
        """

    @abstractmethod
    def step_taken(self) -> None:
        """Places that were deferred are candidates again, before the others."""

    @abstractmethod
    def cut(self, head: Link, place: Link, /) -> None:
        """`head`, in no queue, was cut from the upper end of the run of `place`, which is queued. It is queued now,
        best right after `place`: lower blocks leave first, and parts that stay neighbours can be joined.
        """

    @abstractmethod
    def joined(self, place: Link, /) -> None:
        """The run is one with the run below it, which keeps its own place. In no queue now."""

    @abstractmethod
    def removed(self, place: Link, /) -> None:
        """The run has left the tier. In no queue now."""

    @abstractmethod
    def candidates(self) -> Iterator[Run]:
        """Runs in the order in which they should leave. The caller may remove or move the run just yielded."""

    def last_copies(self) -> Iterator[Run]:
        """As `candidates`, without those of which nothing is lost because another tier has them."""
        return self.candidates()

    def worth(self, run: Run, /) -> float:
        """What keeping it earns, to be compared with other runs; all are equal for a policy that cannot tell."""
        return 0.0

    @abstractmethod
    def queues(self) -> Sequence[RunQueue]:
        """Every queue that may hold a place."""

    def cleared(self) -> None:
        """The tier is empty. Places that were queued keep their links; the caller resets them."""
        for queue in self.queues():
            queue.forget()
