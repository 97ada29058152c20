"""The slot table: every answer against the rules slot by slot, and what they cost."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.worker.hazards import Actor, Hazard, HazardTable, _Use
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent
from fastdeploy_kvcache_v1.worker.slot_set import slot_set
from tests.night import worth_it


class Slot:
    def __init__(self):
        self.writer = None  # (actor, event)
        self.readers = []  # (actor, event) of the reads since the write, of a stream the last one
        self.given_up = False

    def holds_no_data(self):
        return self.given_up or (self.writer is not None and self.writer[1].error is not None)


class SlotBySlot:
    """The rules of `HazardTable` without any short cut: what the table is compared with."""

    def __init__(self, num_slots):
        self.slots = [Slot() for _ in range(num_slots)]

    def before(self, actor, reads, writes):
        """`{event: needs_data}`."""
        found = {}

        def add(use, hazard):
            if use is not None and (use[0] is not actor or not actor.is_fifo):
                found[use[1]] = found.get(use[1], False) or hazard is Hazard.READ_AFTER_WRITE

        for number, slot in enumerate(self.slots):
            if number in writes:
                add(slot.writer, Hazard.WRITE_AFTER_WRITE)
                for reader in slot.readers:
                    add(reader, Hazard.WRITE_AFTER_READ)
            elif number in reads:
                add(slot.writer, Hazard.READ_AFTER_WRITE)
        return {
            event: needs_data
            for event, needs_data in found.items()
            if not event.done() or (needs_data and event.error is not None)
        }

    def after(self, actor, event, reads, writes):
        for number, slot in enumerate(self.slots):
            if number in writes:
                self.slots[number] = Slot()
                self.slots[number].writer = actor, event
            elif number in reads:
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


IN, OUT = Actor.SWAP_IN, Actor.SWAP_OUT


def test_memory_is_bounded_by_the_slots_in_use():
    table = HazardTable("device", 100_000)
    for slot in range(20_000):
        event = CpuEvent()
        table.after(IN, event, writes=(slot,))
        event.finish()
        table.check()
    assert table.num_uses <= 64


def test_ended_use_is_pruned_although_earlier_uses_still_run():
    table, ended = HazardTable("device", 4), CpuEvent()
    for slot in (0, 1):
        table.after(OUT, CpuEvent(), reads=(slot,))
    table.after(IN, ended, writes=(2,))
    ended.finish()
    table.prune()
    assert table.num_uses == 2


@pytest.mark.parametrize(
    ("uses", "message"),
    [
        # actor, slots that are read and written
        ([(IN, (), (0,)), (OUT, (), (0,))], r"slots \[0\] have two last uses"),
        ([(IN, (1, 2), ()), (IN, (1,), ())], r"slots \[1\] have two last uses"),
        ([(IN, (0,), ()), (OUT, (), (0,))], "a reader from before a write"),
        ([(IN, (), ())], "a use of no slot"),
        ([(IN, (), (9,))], "slot 9 of 4"),
    ],
)
def test_check_finds_uses_that_no_order_of_calls_can_leave(uses, message):
    table = HazardTable("device", 4)
    table._uses = [_Use(actor, CpuEvent(), slot_set(reads), slot_set(writes)) for actor, reads, writes in uses]
    with pytest.raises(InvariantError, match=message):
        table.check()


def test_check_finds_a_failed_slot_without_a_writer():
    table = HazardTable("device", 4)
    table.after(IN, CpuEvent(), writes=(1,))
    table._uses[0].given_up = slot_set((1, 2))
    with pytest.raises(InvariantError, match=r"slots \[2\] failed without a writer"):
        table.check()


def test_nothing_grows_with_the_size_of_the_tier():
    """A bit for each slot of this one would be 512 MiB."""
    num_slots = 1 << 32
    table, far = HazardTable("host", num_slots), [num_slots - 1 - 1000 * index for index in range(300)]
    written, read = CpuEvent(), CpuEvent()
    table.after(IN, written, writes=far[:32])
    table.after(OUT, read, reads=range(2000))
    assert [wait.event for wait in table.before(OUT, reads=far)] == [written]
    assert [wait.event for wait in table.before(IN, writes=[*far[100:], 7])] == [read]
    table.after(IN, CpuEvent(), reads=far[32:], writes=[0, *far[16:40]])
    assert table.num_uses == 3
    table.fail(far, written)
    assert table.failed([*far, 3]) == far[:16]
    table.refilled(far)
    assert table.failed(far) == []
    table.check()


def test_any_thread_may_ask_and_tell():
    table = HazardTable("device", 24)

    def use(number: int) -> None:
        rng, actor, own = random.Random(number), list(Actor)[number % len(Actor)], 20 + number
        for _ in range(150):
            event, mine = CpuEvent(), CpuEvent()
            slots = rng.sample(range(20), 3)
            table.before(actor, reads=slots[:2], writes=slots[1:])
            table.after(actor, event, reads=slots[:2], writes=slots[1:])
            table.after(Actor.REMOTE, mine, writes=(own,))
            rng.choice([table.refilled, table.failed, partial(table.fail, event=event)])(slots)
            assert [wait.event for wait in table.before(Actor.REMOTE, reads=(own,))] == [mine], "it was lost"
            assert table.num_uses >= 1
            table.check()
            mine.finish()
            event.finish(rng.choice([None, OSError("gone")]))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(use, range(4))] == [None] * 4
    finally:
        sys.setswitchinterval(before)
    table.prune()
    table.check()


# ---- slot by slot

STEPS = 250


def slots_of(rng: random.Random, num_slots: int) -> object:
    """A tuple, a set or a `SlotSet`: few slots, a range, all, or none."""
    kind = rng.random()
    if kind < 0.03:
        return range(num_slots)
    if kind < 0.2:
        return ()
    if kind < 0.6:
        chosen = rng.sample(range(num_slots), rng.randint(1, min(3, num_slots)))
    else:
        first = rng.randrange(num_slots)
        chosen = list(range(first, min(num_slots, first + rng.randint(1, 20))))
    return rng.choice([tuple, frozenset, slot_set])(chosen)


@pytest.mark.parametrize("num_slots", [1, 6, 70])
@pytest.mark.parametrize("seed", range(8))
def test_every_answer_is_that_of_the_rules_slot_by_slot(seed, num_slots):
    rng = random.Random(f"{seed} {num_slots}")
    table, model = HazardTable("device", num_slots), SlotBySlot(num_slots)
    streams: dict[Actor, list[CpuEvent]] = {actor: [] for actor in Actor}
    waits_seen = failures_seen = 0
    for _ in range(STEPS):
        what, actor = rng.random(), rng.choice(list(Actor))
        reads, writes = slots_of(rng, num_slots), slots_of(rng, num_slots)
        if what < 0.5:
            waits = table.before(actor, reads=reads, writes=writes)
            assert {wait.event: wait.needs_data for wait in waits} == model.before(actor, reads, writes)
            assert not actor.is_fifo or all(wait.earlier is not actor for wait in waits)
            event = CpuEvent()
            if rng.random() < 0.1:  # it is over before it is recorded: everything it waited for and came after is, too
                for earlier in {*streams[actor], *(wait.event for wait in waits)}:
                    if not earlier.done():
                        earlier.finish()
                event.finish(rng.choice([None, OSError("gone")]))
            table.after(actor, event, reads=reads, writes=writes)
            model.after(actor, event, reads, writes)
            streams[actor].append(event)
            waits_seen += bool(waits)
        elif what < 0.8:
            running = [event for event in streams[actor] if not event.done()]
            if not actor.is_fifo:
                rng.shuffle(running)
            for event in running[: rng.randint(0, 2)]:
                event.finish(rng.choice([None, None, ValueError("copy")]))
        elif what < 0.87 and any(not event.done() for event in streams[actor]):  # what runs can be given up
            event = rng.choice([event for event in streams[actor] if not event.done()])
            table.fail(writes, event)
            model.fail(writes, event)
        elif what < 0.94:
            table.refilled(writes)
            model.refilled(writes)
        else:
            table.prune()
        assert table.failed(range(num_slots)) == model.failed()
        failures_seen += bool(model.failed())
        table.check()
    worth_it(min(waits_seen, failures_seen) > 5)


class CountedEvent(CpuEvent):
    questions = 0

    def done(self) -> bool:
        CountedEvent.questions += 1
        return super().done()


def test_an_event_is_asked_once_per_call_however_many_slots_it_has():
    table = HazardTable("device", 20_000)
    for number in range(4):
        table.after(Actor.SWAP_OUT, CountedEvent(), reads=range(number * 2000, number * 2000 + 2000))
    CountedEvent.questions = 0
    assert len(table.before(Actor.COMPUTE, writes=range(8000))) == 4
    assert CountedEvent.questions == 4
    CountedEvent.questions = 0
    table.after(Actor.COMPUTE, CountedEvent(), writes=range(100, 4000))
    assert CountedEvent.questions <= 2, "a stream whose first use is not done is asked no further"
    assert table.num_uses == 4, "the first readers of overwritten slots keep only what is left to them"
