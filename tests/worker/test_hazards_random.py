"""`HazardTable` against the same rules slot by slot: every answer, for random uses of few slots and of many."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.worker.hazards import Actor, HazardTable
from fastdeploy_kvcache_v1.worker.slot_set import SlotSet
from tests.night import worth_it
from tests.worker.slot_by_slot import SlotBySlot
from tests.worker.test_hazards import FakeEvent

STEPS = 250


def slots_of(rng: random.Random, num_slots: int) -> object:
    """None, a tuple, a set or a `SlotSet`: few slots, a range, or none."""
    kind = rng.random()
    if kind < 0.03:
        return None
    if kind < 0.2:
        return ()
    if kind < 0.6:
        chosen = rng.sample(range(num_slots), rng.randint(1, min(3, num_slots)))
    else:
        first = rng.randrange(num_slots)
        chosen = list(range(first, min(num_slots, first + rng.randint(1, 20))))
    return rng.choice([tuple, frozenset, SlotSet.of])(chosen)


@pytest.mark.parametrize("num_slots", [1, 6, 70])
@pytest.mark.parametrize("seed", range(8))
def test_every_answer_is_that_of_the_rules_slot_by_slot(seed, num_slots):
    rng = random.Random(f"{seed} {num_slots}")
    table, model = HazardTable("device", num_slots), SlotBySlot(num_slots)
    streams: dict[Actor, list[FakeEvent]] = {actor: [] for actor in Actor}
    waits_seen = failures_seen = 0
    for _ in range(STEPS):
        what, actor = rng.random(), rng.choice(list(Actor))
        reads, writes = slots_of(rng, num_slots), slots_of(rng, num_slots)
        if what < 0.5:
            waits = table.before(actor, reads=reads, writes=writes)
            assert {wait.event: wait.needs_data for wait in waits} == model.before(actor, reads, writes)
            assert all(wait.later is actor for wait in waits)
            assert not actor.is_fifo or all(wait.earlier is not actor for wait in waits)
            event = FakeEvent()
            if rng.random() < 0.1:  # it is over before it is recorded: everything it waited for and came after is, too
                for done in streams[actor] + [wait.event for wait in waits]:
                    done.is_done = True
                event.is_done, event.failure = True, rng.choice([None, OSError("gone")])
            table.after(actor, event, reads=reads, writes=writes)
            model.after(actor, event, reads, writes)
            streams[actor].append(event)
            waits_seen += bool(waits)
        elif what < 0.8:
            running = [event for event in streams[actor] if not event.is_done]
            if not actor.is_fifo:
                rng.shuffle(running)
            for event in running[: rng.randint(0, 2)]:
                event.is_done, event.failure = True, rng.choice([None, None, ValueError("copy")])
        elif what < 0.87 and any(not event.is_done for event in streams[actor]):  # what runs can be given up
            event = rng.choice([event for event in streams[actor] if not event.is_done])
            table.fail(writes or (), event)
            model.fail(writes or (), event)
        elif what < 0.94:
            table.refilled(writes or ())
            model.refilled(writes or ())
        else:
            table.prune()
        assert table.failed(range(num_slots)) == model.failed()
        failures_seen += bool(model.failed())
        table.check()
    worth_it(min(waits_seen, failures_seen) > 5)


class CountedEvent(FakeEvent):
    questions = 0

    def done(self) -> bool:
        CountedEvent.questions += 1
        return super().done()


def test_an_event_is_asked_once_per_call_however_many_slots_it_has():
    table = HazardTable("device", 20_000)
    for number in range(4):
        table.after(Actor.OUTPUT, CountedEvent(), reads=range(number * 2000, number * 2000 + 2000))
    CountedEvent.questions = 0
    assert len(table.before(Actor.COMPUTE, writes=range(8000))) == 4
    assert CountedEvent.questions == 4
    CountedEvent.questions = 0
    table.after(Actor.COMPUTE, CountedEvent(), writes=range(100, 4000))
    assert CountedEvent.questions <= 2, "a stream whose first use is not done is asked no further"
    assert table.num_uses == 4, "the first readers of overwritten slots keep only what is left to them"


def test_what_a_stream_reads_again_and_again_is_one_use():
    table = HazardTable("device", 1000)
    for _ in range(50):
        table.after(Actor.COMPUTE, FakeEvent(), reads=range(500), writes=(999,))
        table.check()
    assert table.num_uses == 1
