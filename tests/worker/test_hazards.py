"""The slot table against a model that forgets nothing, and the few rules stated by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.errors import CacheStateError, InvariantError
from fastdeploy_kvcache_v1.worker.hazards import Actor, Hazard, HazardTable, _Use
from fastdeploy_kvcache_v1.worker.runtime import Event

IN, OUT, COMPUTE, REMOTE = Actor


class FakeEvent(Event):
    """Done when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.failure: Exception | None = None

    def done(self) -> bool:
        return self.is_done

    @property
    def error(self) -> Exception | None:
        return self.failure if self.is_done else None

    def wait_done(self, timeout: float | None = None) -> bool:
        return self.is_done

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


class Use:
    def __init__(self, actor, reads, writes, dependencies, previous):
        self.actor, self.reads, self.writes = actor, frozenset(reads) - frozenset(writes), frozenset(writes)
        self.event = FakeEvent()
        # What this use really comes after: what it waited for, its stream's last use, and all they came after.
        self.after: set[Use] = set()
        for use in [*dependencies, *previous]:
            self.after |= {use} | use.after

    def conflicts(self, other: Use) -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


slots = st.frozensets(st.integers(0, 4), max_size=3)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.sampled_from(list(Actor)), slots, slots),
        st.tuples(st.just("finish"), st.integers(0, 100), st.booleans()),
        st.tuples(st.just("prune")),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(actions)
def test_every_conflicting_unfinished_use_is_waited_for(script):
    table, history = HazardTable("device", 5), []
    for action in script:
        if action[0] == "use":
            _kind, actor, reads, writes = action
            waits = table.before(actor, reads=reads, writes=writes)
            events = {wait.event for wait in waits}
            assert len(events) == len(waits), "each event once"
            waited = [use for use in history if use.event in events]
            previous = [use for use in history if use.actor is actor and actor.is_fifo][-1:]
            use = Use(actor, reads, writes, waited, previous)
            for earlier in history:
                if use.conflicts(earlier) and not earlier.event.is_done:
                    assert earlier in use.after, "an unfinished conflicting use is not waited for"
            assert all(use.conflicts(earlier) for earlier in waited), "a wait without a reason"
            table.after(actor, use.event, reads=reads, writes=writes)
            history.append(use)
        elif action[0] == "finish":
            # Events finish in an order that streams allow: everything a use comes after has finished.
            ready = [use for use in history if not use.event.is_done and all(u.event.is_done for u in use.after)]
            if ready:
                use = ready[action[1] % len(ready)]
                use.event.is_done = True
                use.event.failure = ValueError("copy") if action[2] else None
        else:
            table.prune()
        table.check()


@pytest.mark.parametrize(
    ("earlier", "earlier_use", "later", "later_use", "hazard"),
    [
        (COMPUTE, "writes", OUT, "reads", Hazard.READ_AFTER_WRITE),
        (OUT, "reads", COMPUTE, "writes", Hazard.WRITE_AFTER_READ),
        (COMPUTE, "reads", IN, "writes", Hazard.WRITE_AFTER_READ),
        (COMPUTE, "writes", IN, "writes", Hazard.WRITE_AFTER_WRITE),
        (OUT, "reads", IN, "writes", Hazard.WRITE_AFTER_READ),
        (IN, "writes", OUT, "reads", Hazard.READ_AFTER_WRITE),
        (IN, "writes", COMPUTE, "reads", Hazard.READ_AFTER_WRITE),
        (IN, "writes", COMPUTE, "writes", Hazard.WRITE_AFTER_WRITE),
        (OUT, "writes", IN, "reads", Hazard.READ_AFTER_WRITE),
        (IN, "reads", OUT, "writes", Hazard.WRITE_AFTER_READ),
    ],
)
def test_the_rules(earlier, earlier_use, later, later_use, hazard):
    table, event = HazardTable("device", 4), FakeEvent()
    table.after(earlier, event, **{earlier_use: (1, 2)})
    assert table.before(later, **{later_use: (0, 3)}) == []
    assert table.before(earlier, **{later_use: (2,)}) == [], "its own stream is in order anyway"
    assert [(wait.event, wait.hazard) for wait in table.before(later, **{later_use: (2, 3)})] == [(event, hazard)]
    event.is_done = True
    assert table.before(later, **{later_use: (2,)}) == []
    table.prune()
    assert len(table) == 0


@pytest.mark.parametrize(
    ("earlier_use", "later_use", "hazard"),
    [
        ("writes", "reads", Hazard.READ_AFTER_WRITE),
        ("reads", "writes", Hazard.WRITE_AFTER_READ),
        ("writes", "writes", Hazard.WRITE_AFTER_WRITE),
    ],
)
def test_uses_by_peers_wait_for_each_other(earlier_use, later_use, hazard):
    """A fetch into a slot that another fetch fills or a lease reads: they end in any order."""
    table, event = HazardTable("device", 4), FakeEvent()
    table.after(REMOTE, event, **{earlier_use: (1, 2)})
    assert [(wait.event, wait.hazard) for wait in table.before(REMOTE, **{later_use: (2, 3)})] == [(event, hazard)]
    assert table.before(REMOTE, **{later_use: (0, 3)}) == []
    event.is_done = True
    assert table.before(REMOTE, **{later_use: (2,)}) == []


def test_readers_do_not_wait_for_each_other_and_a_write_waits_for_all():
    table, events = HazardTable("device", 4), [FakeEvent() for _ in range(3)]
    table.after(OUT, events[0], reads=(1,))
    assert table.before(COMPUTE, reads=(1,)) == []
    table.after(COMPUTE, events[1], reads=(1,))
    table.after(COMPUTE, events[2], reads=(1,))
    waited = {wait.event for wait in table.before(IN, writes=(1,))}
    assert waited == {events[0], events[2]}, "a stream is FIFO: its last reader stands for those before"


def test_a_failed_write_is_remembered_until_the_slot_is_written_again():
    table, event = HazardTable("host", 4), FakeEvent()
    table.after(OUT, event, writes=(1, 2))
    event.is_done, event.failure = True, ValueError("copy")
    table.prune()
    assert table.failed(range(4)) == [1, 2]
    (wait,) = table.before(IN, reads=(1,))
    assert wait.needs_data
    assert table.before(IN, writes=(1,)) == [], "writing needs no data"
    repaired = FakeEvent()
    repaired.is_done = True
    table.after(COMPUTE, repaired, writes=(1,))
    assert table.failed(range(4)) == [2]
    table.clear()
    assert table.failed(range(4)) == []


def test_what_is_read_and_written_needs_no_old_data():
    table, event = HazardTable("device", 4), FakeEvent()
    table.after(IN, event, writes=(1,))
    (wait,) = table.before(COMPUTE, reads=(1,), writes=(1,))
    assert not wait.needs_data


def test_a_given_up_write_stays_in_order():
    table, event = HazardTable("device", 4), FakeEvent()
    table.after(IN, event, writes=(1,))
    table.fail((0, 1), event)
    assert table.failed(range(4)) == [1]
    assert [wait.event for wait in table.before(COMPUTE, writes=(1,))] == [event]
    event.is_done = True
    table.prune()
    assert table.failed([1]) == [1], "the copy came too late: nobody counts on it"
    table.after(COMPUTE, event, writes=(1,))
    assert table.failed([1]) == []


def test_any_slot_stands_for_all_of_them():
    table, first, second = HazardTable("device", 4), FakeEvent(), FakeEvent()
    table.after(COMPUTE, first, reads=None, writes=None)
    assert [wait.event for wait in table.before(OUT, reads=(3,))] == [first]
    assert [wait.event for wait in table.before(IN, writes=(0,))] == [first]
    assert table.before(COMPUTE, reads=(3,)) == []
    table.after(IN, second, writes=(2,))
    (wait,) = table.before(COMPUTE, reads=None, writes=None)
    assert wait.event is second
    assert not wait.needs_data
    first.is_done = second.is_done = True
    table.prune()
    assert table.before(IN, writes=(0,)) == []


def test_memory_is_bounded_by_the_slots_in_use():
    table = HazardTable("device", 100_000)
    for slot in range(20_000):
        event = FakeEvent()
        table.after(IN, event, writes=(slot,))
        event.is_done = True
        table.check()
    assert len(table) <= 64


def test_clearing_refuses_while_copies_run():
    table, event = HazardTable("device", 4), FakeEvent()
    table.after(IN, event, writes=(1,))
    with pytest.raises(CacheStateError, match="still in use"):
        table.clear()


def test_check_sees_a_foreign_slot():
    table = HazardTable("device", 4)
    table.after(IN, FakeEvent(), writes=(9,))
    with pytest.raises(InvariantError, match="slot 9 of 4"):
        table.check()


@pytest.mark.parametrize(
    ("uses", "message"),
    [
        # actor, bitmaps of slots that are read and written
        ([(IN, 0, 1), (OUT, 0, 1)], r"slots \[0\] have two last uses"),
        ([(IN, 6, 0), (IN, 2, 0)], r"slots \[1\] have two last uses"),
        ([(IN, 1, 0), (OUT, 0, 1)], "a reader from before a write"),
        ([(IN, 0, 0)], "a use of no slot"),
    ],
)
def test_check_sees_what_no_order_of_uses_leaves(uses, message):
    table = HazardTable("device", 4)
    table._uses = [_Use(actor, FakeEvent(), reads, writes) for actor, reads, writes in uses]
    with pytest.raises(InvariantError, match=message):
        table.check()


def test_a_write_that_failed_before_it_was_recorded_is_remembered():
    table = HazardTable("device", 8)
    failed = FakeEvent()
    failed.is_done, failed.failure = True, OSError("gone")
    table.after(Actor.INPUT, failed, writes=(3,))
    assert table.failed((3,)) == [3]
    (dependency,) = table.before(Actor.COMPUTE, reads=(3,))
    assert dependency.needs_data
