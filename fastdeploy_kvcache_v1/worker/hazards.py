"""Who used a slot last, and therefore what the next use of it must wait for. One table per tier.

There is one rule: a use waits for every earlier use of the same slot that conflicts with it, where reads conflict with
writes and writes with everything. All cases of a D2H meeting compute, an H2D meeting a D2H, and so on, follow from it.
The table only names events; streams do the waiting. A use is one event and two sets of slots, so what a question
costs goes by the uses in flight, little by their slots, and not by the size of the tier.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..errors import InvariantError
from .runtime import Event
from .slot_set import NO_SLOTS, SlotSet, slot_set


class Actor(enum.Enum):
    """Whose stream uses a slot. Uses by one stream are ordered by its FIFO and need no event."""

    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    COMPUTE = "compute"
    REMOTE = "remote"
    """A lease or a fetch of `transfer/`: no stream of this process.
    They end in any order, so none stands for another, and they wait for each other.
    """

    @property
    def is_fifo(self) -> bool:
        """Whether a use that has ended says that the earlier ones of this actor have."""
        return self is not Actor.REMOTE


class Hazard(enum.Enum):
    READ_AFTER_WRITE = "RAW"
    WRITE_AFTER_READ = "WAR"
    WRITE_AFTER_WRITE = "WAW"


class Dependency(NamedTuple):
    """A use waits for `event` of `earlier`."""

    event: Event
    earlier: Actor
    hazard: Hazard

    @property
    def needs_data(self) -> bool:
        """True when the later use reads what the earlier one wrote, so that it fails with it."""
        return self.hazard is Hazard.READ_AFTER_WRITE

    @property
    def is_over(self) -> bool:
        """True when waiting would change nothing."""
        return self.event.done() and not (self.needs_data and self.event.error is not None)


class _Use:
    """One operation on a stream, and the slots for which it still counts."""

    __slots__ = ("actor", "event", "given_up", "reads", "writes")

    def __init__(self, actor: Actor, event: Event, reads: SlotSet, writes: SlotSet) -> None:
        self.actor = actor
        self.event = event
        self.reads = reads
        self.writes = writes
        self.given_up = NO_SLOTS
        """Those of `writes` that nobody counts on any more."""

    def without_data(self) -> SlotSet:
        """Those of `writes` that failed or were given up."""
        return self.writes if self.event.error is not None else self.given_up

    def forget(self, slots: SlotSet) -> None:
        self.reads -= slots
        self.writes -= slots
        self.given_up -= slots

    def __bool__(self) -> bool:
        """Whether it counts for any slot."""
        return bool(self.reads or self.writes)


class HazardTable:
    """Unfinished uses of the slots `0..num_slots-1` of one tier, and failed writes nobody has repaired yet.

    The caller asks `before`, makes its stream wait, submits, records an event and tells it to `after`. Each slot counts
    for its last writer and for the readers since, and there only for the last one of each actor: streams are FIFO, so
    that one stands for those before it. Each call costs at most one question per event and a few steps per use in
    flight, however large the tier is, and finished uses go.

    Thread-safe: any thread may call anything; events are asked while the table is locked, and must not ask the table.
    Of two threads that use the same slots at once, both may hear of nothing before either has told of its use: who
    gives slots away gives each to one of them.
    """

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self._lock = threading.RLock()
        self._uses: list[_Use] = []
        """In the order in which they were recorded."""

    def before(
        self, actor: Actor, *, reads: Iterable[int] = NO_SLOTS, writes: Iterable[int] = NO_SLOTS
    ) -> list[Dependency]:
        """What a use by `actor` must wait for.

        A slot that is both read and written counts as written: its old content need not be valid. A `SlotSet` costs
        nothing to look at.
        """
        with self._lock:
            found = self._conflicts(actor, slot_set(reads), slot_set(writes))
            return [dependency for dependency in found if not dependency.is_over]

    def after(
        self, actor: Actor, event: Event, *, reads: Iterable[int] = NO_SLOTS, writes: Iterable[int] = NO_SLOTS
    ) -> None:
        """Record a use that `before` was asked about and whose stream waits as told."""
        read, written = slot_set(reads), slot_set(writes)
        with self._lock:
            for use in self._uses:
                use.forget(written)  # the write has waited for it
                if use.actor is actor and actor.is_fifo:
                    use.reads -= read
            self._uses.append(_Use(actor, event, read, written))
            self.prune()

    def fail(self, slots: Iterable[int], event: Event) -> None:
        """The write recorded with `event` was given up, though it may still happen: its slots hold no data."""
        given_up = slot_set(slots)
        with self._lock:
            for use in self._uses:
                if use.event is event:
                    use.given_up |= use.writes & given_up

    def failed(self, slots: Iterable[int]) -> list[int]:
        """Those of `slots` whose last write failed or was given up."""
        with self._lock:
            without_data = self._without_data()
        return [slot for slot in slots if slot in without_data] if without_data else []

    def refilled(self, slots: Iterable[int]) -> None:
        """What is no stream has filled `slots`, after every earlier use of them: a failed write is repaired."""
        filled = slot_set(slots)
        with self._lock:
            repaired = self._without_data() & filled
            if repaired:
                for use in self._uses:
                    use.forget(repaired)
                self._drop_empty()

    def _without_data(self) -> SlotSet:
        return SlotSet.union(NO_SLOTS, *(use.without_data() for use in self._uses))

    def prune(self) -> None:
        """Forget finished uses. Runs by itself. A stream is FIFO: behind a use that is not done it is not asked."""
        busy: set[Actor] = set()
        with self._lock:
            for use in self._uses:
                if use.actor in busy:
                    continue
                if not use.event.done():
                    if use.actor.is_fifo:
                        busy.add(use.actor)
                else:  # in this order: a writer that fails meanwhile has to be seen
                    use.reads, use.writes = NO_SLOTS, use.without_data()
            self._drop_empty()

    def _drop_empty(self) -> None:
        self._uses = [use for use in self._uses if use]

    @property
    def num_uses(self) -> int:
        """Operations the table remembers."""
        with self._lock:
            return len(self._uses)

    def _conflicts(self, actor: Actor, read: SlotSet, written: SlotSet) -> Iterator[Dependency]:
        """Every remembered use that conflicts, but those of the same stream, once; finished ones as well."""
        for use in self._uses:
            if use.actor is actor and actor.is_fifo:
                continue
            if not read.isdisjoint(use.writes - written):
                yield Dependency(use.event, use.actor, Hazard.READ_AFTER_WRITE)
            elif not written.isdisjoint(use.writes):
                yield Dependency(use.event, use.actor, Hazard.WRITE_AFTER_WRITE)
            elif not written.isdisjoint(use.reads):
                yield Dependency(use.event, use.actor, Hazard.WRITE_AFTER_READ)

    def check(self) -> None:
        """Raises `InvariantError`."""
        written = NO_SLOTS
        readers: dict[Actor, SlotSet] = dict.fromkeys(Actor, NO_SLOTS)
        with self._lock:
            for use in self._uses:
                # Only slots of this tier are remembered, and only for a use.
                highest = max(use.reads | use.writes, default=-1)
                if highest >= self.num_slots:
                    raise InvariantError(f"{self.name} hazards name slot {highest} of {self.num_slots}")
                if not use:
                    raise InvariantError(f"{self.name} hazards remember a use of no slot")
                # A slot has one last writer, and since then one last reader of each actor that is a stream.
                doubled = use.writes & written | use.reads & readers[use.actor]
                if doubled:
                    raise InvariantError(f"{self.name} slots {list(doubled)} have two last uses of one kind")
                if any(not use.writes.isdisjoint(of_actor) for of_actor in readers.values()):
                    raise InvariantError(f"{self.name} hazards remember a reader from before a write")
                # A given-up write is a write.
                if use.given_up - use.writes:
                    raise InvariantError(f"{self.name} slots {list(use.given_up - use.writes)} failed without a writer")
                written |= use.writes
                if use.actor.is_fifo:
                    readers[use.actor] |= use.reads
