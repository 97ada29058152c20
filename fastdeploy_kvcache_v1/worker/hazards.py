"""Who used a slot last, and therefore what the next use of it must wait for. One table per tier.

There is one rule: a use waits for every earlier use of the same slot that conflicts with it, where reads conflict with
writes and writes with everything. All cases of a D2H meeting compute, an H2D meeting a D2H, and so on, follow from it.
The table only names events; streams do the waiting.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ..errors import CacheStateError, InvariantError
from .runtime import Event


class Actor(enum.Enum):
    """Whose stream uses a slot. Uses by one actor are ordered by its stream's FIFO and need no event."""

    INPUT = "input"
    OUTPUT = "output"
    COMPUTE = "compute"


class Hazard(enum.Enum):
    READ_AFTER_WRITE = "RAW"
    WRITE_AFTER_READ = "WAR"
    WRITE_AFTER_WRITE = "WAW"


class Dependency(NamedTuple):
    """A use by `later` waits for `event` of `earlier`."""

    event: Event
    earlier: Actor
    later: Actor
    hazard: Hazard

    @property
    def needs_data(self) -> bool:
        """True when the later use reads what the earlier one wrote, so that it fails with it."""
        return self.hazard is Hazard.READ_AFTER_WRITE

    @property
    def is_over(self) -> bool:
        """True when waiting would change nothing."""
        return self.event.done() and not (self.needs_data and self.event.error is not None)


class _Use(NamedTuple):
    actor: Actor
    event: Event


class _SlotUses:
    """Uses of one slot since its last write. A write waits for all before it, so it stands for them."""

    __slots__ = ("failed", "readers", "writer")

    def __init__(self) -> None:
        self.writer: _Use | None = None
        self.readers: list[_Use] = []
        self.failed = False

    def holds_no_data(self) -> bool:
        return self.failed or (self.writer is not None and self.writer.event.error is not None)

    def is_over(self) -> bool:
        # In this order: a writer that fails meanwhile has to be seen.
        if (self.writer is not None and not self.writer.event.done()) or self.holds_no_data():
            return False
        return all(use.event.done() for use in self.readers)


_FIRST_PRUNE = 64


class HazardTable:
    """Unfinished uses of the slots `0..num_slots-1` of one tier, and failed writes nobody has repaired yet.

    The caller asks `before`, makes its stream wait, submits, records an event and tells it to `after`. Not
    thread-safe; events finish on other threads. Memory is bounded by the slots in use: finished uses are pruned.
    """

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self._slots: dict[int, _SlotUses] = {}
        self._anywhere: _Use | None = None  # latest use whose slots are unknown: reads and writes everything
        self._prune_at = _FIRST_PRUNE

    def before(
        self, actor: Actor, *, reads: Iterable[int] | None = (), writes: Collection[int] | None = ()
    ) -> list[Dependency]:
        """What a use by `actor` must wait for, each event once. None stands for "any slot".

        A slot that is both read and written counts as written: its old content need not be valid. With unknown reads
        nothing needs data, because most slots are not read. O(slots named), O(1) when nothing is unfinished.
        """
        found: dict[int, Dependency] = {}
        for dependency in self.conflicts(actor, reads, writes):
            known = found.get(id(dependency.event))
            if known is None or (dependency.needs_data and not known.needs_data):
                found[id(dependency.event)] = dependency
        return [dependency for dependency in found.values() if not dependency.is_over]

    def after(
        self, actor: Actor, event: Event, *, reads: Iterable[int] | None = (), writes: Collection[int] | None = ()
    ) -> None:
        """Record a use that `before` was asked about and whose stream waits as told. None stands for "any slot"."""
        if reads is None or writes is None:
            # Streams are FIFO: the latest such event stands for the earlier ones. Failed writes stay failed.
            self._anywhere = _Use(actor, event)
        written = frozenset(writes or ())
        over = event.done()
        if self._slots or not over or event.error is not None:  # one that failed at once is not forgotten
            self._record(_Use(actor, event), [slot for slot in reads or () if slot not in written], written, over)
        if len(self._slots) >= self._prune_at:
            self.prune()

    def fail(self, slots: Iterable[int], event: Event) -> None:
        """The write recorded with `event` was given up, though it may still happen: its slots hold no data."""
        for number in slots:
            slot = self._slots.get(number)
            if slot is not None and slot.writer is not None and slot.writer.event is event:
                slot.failed = True

    def failed(self, slots: Iterable[int]) -> list[int]:
        """Those of `slots` whose last write failed or was given up."""
        return [slot for slot in slots if slot in self._slots and self._slots[slot].holds_no_data()]

    def refilled(self, slots: Iterable[int]) -> None:
        """What is no stream has filled `slots`, after every earlier use of them: a failed write is repaired."""
        for number in slots:
            slot = self._slots.get(number)
            if slot is not None and slot.holds_no_data():
                del self._slots[number]

    def prune(self) -> None:
        """Forget finished uses. Runs by itself."""
        self._slots = {number: slot for number, slot in self._slots.items() if not slot.is_over()}
        self._prune_at = max(_FIRST_PRUNE, 2 * len(self._slots))
        if self._anywhere is not None and self._anywhere.event.done():
            self._anywhere = None

    def clear(self) -> None:
        """Forget everything, failed writes too. Only when no copy is in flight."""
        self.prune()
        busy = [number for number, slot in self._slots.items() if not slot.holds_no_data()]
        if busy:
            raise CacheStateError(f"{self.name} slots {busy} are still in use by copies")
        self._slots.clear()

    def __len__(self) -> int:
        """Slots the table remembers anything about."""
        return len(self._slots)

    def conflicts(
        self, actor: Actor, reads: Iterable[int] | None, writes: Collection[int] | None
    ) -> Iterator[Dependency]:
        """Every earlier use by somebody else that conflicts, finished ones and duplicates included."""
        if self._anywhere is not None and self._anywhere.actor is not actor:
            yield Dependency(self._anywhere.event, self._anywhere.actor, actor, Hazard.WRITE_AFTER_WRITE)
        if not self._slots:
            return
        written = self._slots.keys() if writes is None else frozenset(writes)
        for number in written:
            slot = self._slots.get(number)
            if slot is not None:
                yield from _before_write(slot, actor)
        hazard = Hazard.WRITE_AFTER_WRITE if reads is None else Hazard.READ_AFTER_WRITE
        for number in self._slots if reads is None else reads:
            slot = self._slots.get(number)
            if slot is not None and number not in written and slot.writer and slot.writer.actor is not actor:
                yield Dependency(slot.writer.event, slot.writer.actor, actor, hazard)

    def _record(self, use: _Use, reads: Iterable[int], writes: Iterable[int], over: bool) -> None:
        for number in reads:
            if over:
                continue
            slot = self._slots.setdefault(number, _SlotUses())
            slot.readers = [reader for reader in slot.readers if not reader.event.done()]
            slot.readers.append(use)
        for number in writes:
            if over and use.event.error is None:
                self._slots.pop(number, None)
                continue
            slot = self._slots[number] = _SlotUses()
            slot.writer = use

    def check(self) -> None:
        """Raises `InvariantError`."""
        for number, slot in self._slots.items():
            # Only slots of this tier are remembered, and only for a use.
            if not 0 <= number < self.num_slots:
                raise InvariantError(f"{self.name} hazards name slot {number} of {self.num_slots}")
            if slot.writer is None and not slot.readers:
                raise InvariantError(f"{self.name} slot {number} is remembered without a use")
            # A given-up write is a write.
            if slot.failed and slot.writer is None:
                raise InvariantError(f"{self.name} slot {number} failed without a writer")
        # Pruning keeps the table near the number of slots really in use.
        if len(self._slots) > min(self.num_slots, self._prune_at):
            raise InvariantError(f"{self.name} hazards remember {len(self._slots)} slots, prune at {self._prune_at}")


def _before_write(slot: _SlotUses, actor: Actor) -> Iterator[Dependency]:
    if slot.writer is not None and slot.writer.actor is not actor:
        yield Dependency(slot.writer.event, slot.writer.actor, actor, Hazard.WRITE_AFTER_WRITE)
    for reader in slot.readers:
        if reader.actor is not actor:
            yield Dependency(reader.event, reader.actor, actor, Hazard.WRITE_AFTER_READ)
