"""The rules of `HazardTable`, slot by slot and without any short cut: what the table is compared with."""

from __future__ import annotations

from fastdeploy_kvcache_v1.worker.hazards import Hazard


class Slot:
    def __init__(self):
        self.writer = None  # (actor, event)
        self.readers = []  # (actor, event) of the reads since the write, of a stream the last one
        self.given_up = False

    def holds_no_data(self):
        return self.given_up or (self.writer is not None and self.writer[1].error is not None)


class SlotBySlot:
    def __init__(self, num_slots):
        self.slots = [Slot() for _ in range(num_slots)]
        self.anywhere = None

    def before(self, actor, reads, writes):
        """`{event: needs_data}`."""
        found = {}

        def add(use, hazard):
            if use is not None and (use[0] is not actor or not actor.is_fifo):
                found[use[1]] = found.get(use[1], False) or hazard is Hazard.READ_AFTER_WRITE

        add(self.anywhere, Hazard.WRITE_AFTER_WRITE)
        for number, slot in enumerate(self.slots):
            if writes is None or number in writes:
                add(slot.writer, Hazard.WRITE_AFTER_WRITE)
                for reader in slot.readers:
                    add(reader, Hazard.WRITE_AFTER_READ)
            elif reads is None:
                add(slot.writer, Hazard.WRITE_AFTER_WRITE)
            elif number in reads:
                add(slot.writer, Hazard.READ_AFTER_WRITE)
        return {
            event: needs_data
            for event, needs_data in found.items()
            if not event.done() or (needs_data and event.error is not None)
        }

    def after(self, actor, event, reads, writes):
        if reads is None or writes is None:
            self.anywhere = actor, event
        for number, slot in enumerate(self.slots):
            if number in (writes or ()):
                self.slots[number] = Slot()
                self.slots[number].writer = actor, event
            elif number in (reads or ()):
                slot.readers = [each for each in slot.readers if each[0] is not actor or not actor.is_fifo]
                slot.readers.append((actor, event))

    def fail(self, slots, event):
        for number in slots:
            slot = self.slots[number]
            slot.given_up |= slot.writer is not None and slot.writer[1] is event

    def failed(self):
        return [number for number, slot in enumerate(self.slots) if slot.holds_no_data()]

    def refilled(self, slots):
        for number in slots:
            if self.slots[number].holds_no_data():
                self.slots[number] = Slot()
