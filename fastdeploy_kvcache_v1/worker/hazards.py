"""HazardTable: the unfinished uses of a tier's slots, and the events that the next use must wait for.

One rule: a use waits for every earlier conflicting use of the same slot. Reads conflict with writes, writes with
everything. The table names events; streams wait. A use is one event and two sets of slots, so a call costs time by the
uses in flight, not by the size of the tier.
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
    """User of a slot. Uses by one stream are ordered by its FIFO and need no event."""

    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    COMPUTE = "compute"
    REMOTE = "remote"
    """A lease or a fetch of `transfer/`, not a stream: such uses end in any order, and wait for each other."""

    @property
    def is_fifo(self) -> bool:
        """True: when a use of this actor has ended, its earlier uses have too."""
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
        """True: the later use reads what the earlier use wrote, and fails with it."""
        return self.hazard is Hazard.READ_AFTER_WRITE

    @property
    def is_over(self) -> bool:
        """True: a wait would change nothing."""
        return self.event.done() and not (self.needs_data and self.event.error is not None)


class _Use:
    """An operation on a stream, and the slots for which it still counts."""

    __slots__ = ("actor", "event", "given_up", "reads", "writes")

    def __init__(self, actor: Actor, event: Event, reads: SlotSet, writes: SlotSet) -> None:
        self.actor = actor
        self.event = event
        self.reads = reads
        self.writes = writes
        self.given_up = NO_SLOTS
        """Part of `writes`: declared failed while still running."""

    def without_data(self) -> SlotSet:
        """Part of `writes` that failed or was given up."""
        return self.writes if self.event.error is not None else self.given_up

    def forget(self, slots: SlotSet) -> None:
        self.reads -= slots
        self.writes -= slots
        self.given_up -= slots

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes)


class HazardTable:
    """Unfinished uses of the slots `0..num_slots-1` of one tier, and failed writes that are not repaired yet.

    The caller calls `before`, makes its stream wait, submits, records an event and passes it to `after`. A slot
    remembers its last writer, and since then the last reader of each actor, which stands for earlier ones (FIFO).

    Thread-safe. Events are queried under the table's lock and must not call the table. `before` and `after` are not
    atomic together: two threads that use the same slot at once may miss each other. The scheduler must give a slot to
    one of them.
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
        """List the dependencies of a use by `actor`.

        A slot that is both read and written counts as written: its old content need not be valid. A `SlotSet` is not
        copied.
        """
        with self._lock:
            found = self._conflicts(actor, slot_set(reads), slot_set(writes))
            return [dependency for dependency in found if not dependency.is_over]

    def after(
        self, actor: Actor, event: Event, *, reads: Iterable[int] = NO_SLOTS, writes: Iterable[int] = NO_SLOTS
    ) -> None:
        """Record a use whose stream waits for the dependencies of `before`."""
        read, written = slot_set(reads), slot_set(writes)
        with self._lock:
            for use in self._uses:
                use.forget(written)  # the write waits for it
                if use.actor is actor and actor.is_fifo:
                    use.reads -= read
            self._uses.append(_Use(actor, event, read, written))
            self.prune()

    def fail(self, slots: Iterable[int], event: Event) -> None:
        """Declare the write of `event` failed in these slots, though it may still run."""
        given_up = slot_set(slots)
        with self._lock:
            for use in self._uses:
                if use.event is event:
                    use.given_up |= use.writes & given_up

    def failed(self, slots: Iterable[int]) -> list[int]:
        """Return the `slots` whose last write failed or was given up."""
        with self._lock:
            without_data = self._without_data()
        return [slot for slot in slots if slot in without_data] if without_data else []

    def refilled(self, slots: Iterable[int]) -> None:
        """Repair failed writes of `slots`: they were filled from outside, after every earlier use of them."""
        with self._lock:
            failed = self._without_data()
            if failed and (repaired := failed & slot_set(slots)):
                for use in self._uses:
                    use.forget(repaired)
                self._drop_empty()

    def _without_data(self) -> SlotSet:
        return SlotSet.union(NO_SLOTS, *(use.without_data() for use in self._uses))

    def prune(self) -> None:
        """Drop finished uses; `after` calls it. Behind an unfinished use of a FIFO no event is queried."""
        busy: set[Actor] = set()
        with self._lock:
            for use in self._uses:
                if use.actor in busy:
                    continue
                if not use.event.done():
                    if use.actor.is_fifo:
                        busy.add(use.actor)
                else:  # `done` comes first: a writer may fail meanwhile
                    use.reads, use.writes = NO_SLOTS, use.without_data()
            self._drop_empty()

    def _drop_empty(self) -> None:
        self._uses = [use for use in self._uses if use]

    @property
    def num_uses(self) -> int:
        with self._lock:
            return len(self._uses)

    def _conflicts(self, actor: Actor, read: SlotSet, written: SlotSet) -> Iterator[Dependency]:
        """Yield each conflicting use once, finished ones included, except those of the same stream."""
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
                # A use has slots, all of this tier.
                highest = max(use.reads | use.writes, default=-1)
                if highest >= self.num_slots:
                    raise InvariantError(f"{self.name} hazards name slot {highest} of {self.num_slots}")
                if not use:
                    raise InvariantError(f"{self.name} hazards remember a use of no slot")
                # A slot has one last writer, and since then one last reader of each FIFO actor.
                if duplicate := use.writes & written | use.reads & readers[use.actor]:
                    raise InvariantError(f"{self.name} slots {list(duplicate)} have two last uses of one kind")
                if any(not use.writes.isdisjoint(of_actor) for of_actor in readers.values()):
                    raise InvariantError(f"{self.name} hazards remember a reader from before a write")
                # A given-up write is a write.
                if use.given_up - use.writes:
                    raise InvariantError(f"{self.name} slots {list(use.given_up - use.writes)} failed without a writer")
                written |= use.writes
                if use.actor.is_fifo:
                    readers[use.actor] |= use.reads
