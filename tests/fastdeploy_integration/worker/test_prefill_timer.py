"""Which passes are timed, and what for."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.worker.prefill_timer import PrefillTimer
from tests.fastdeploy_integration.cpu_worker.host_tasks import ABORT, DECODE, EXTEND, PREEMPTED, other, prefill


class FakeEvent:
    """As one of a device: it is reached later than it is recorded."""

    error = None

    def __init__(self):
        self.at = None

    def done(self):
        return self.at is not None

    def seconds_since(self, earlier):
        return self.at - earlier.at


class Stream:
    def __init__(self):
        self.events = []

    def record_event(self, *, timed=False):
        assert timed
        self.events.append(FakeEvent())
        return self.events[-1]

    def reach(self, *times):
        """The device gets to the next events."""
        for event, at in zip((each for each in self.events if not each.done()), times, strict=False):
            event.at = at


@pytest.fixture
def timed():
    return SimpleNamespace(timer=PrefillTimer(), stream=Stream())


def run_pass(timed, *tasks, waits_inside=False):
    timed.timer.received(tasks)
    timed.timer.begin(timed.stream, waits_inside=waits_inside)
    timed.timer.end(timed.stream)


def chunk(row, start, end):
    return prefill(row, f"r{row}", range(500), (), start=start, end=end)


LEAVE = other(PREEMPTED, 0, "r0"), other(ABORT, 1, "r1")


@pytest.mark.parametrize(
    ("passes", "told"),
    [
        # what comes before each pass, and whether it waits for copies inside; the tokens of those that are told
        ([([chunk(0, 0, 100)], False), ([], False), ([other(DECODE, 0, "r0")], False)], [100]),
        ([([chunk(0, 0, 100), other(DECODE, 0, "r0"), other(EXTEND, 0, "r0")], False)], [100]),
        ([([chunk(0, 0, 100)], True), ([chunk(1, 0, 40)], False)], [40]),
        ([([chunk(0, 0, 100), chunk(1, 0, 70), chunk(2, 0, 30), *LEAVE], False)], [30]),
        ([([chunk(0, 0, 100), chunk(0, 0, 60)], False)], [60]),
    ],
    ids=["prompts", "longer tables", "no waits", "prompts that stay", "announced twice"],
)
def test_a_pass_is_told_with_the_prompts_that_it_computes(timed, passes, told):
    for tasks, waits_inside in passes:
        for task in tasks:
            timed.timer.received([task])
        run_pass(timed, waits_inside=waits_inside)
    assert len(timed.stream.events) == 2 * len(told)
    timed.stream.reach(1.0, 2.0)
    assert [each.num_tokens for each in timed.timer.take()] == told


def test_a_pass_that_failed_says_nothing(timed):
    timed.timer.received([chunk(0, 0, 100)])
    timed.timer.begin(timed.stream, waits_inside=False)  # it raises then, and is never ended
    run_pass(timed, chunk(1, 0, 40))
    timed.stream.reach(1.0, 2.0, 3.0)
    assert [each.num_tokens for each in timed.timer.take()] == [40]
    run_pass(timed, chunk(1, 40, 80))
    timed.stream.events[-1].error = RuntimeError("Xid 31")
    timed.stream.reach(4.0, 5.0)
    assert timed.timer.take() == ()


def test_what_is_forgotten_is_never_told(timed):
    run_pass(timed, chunk(0, 0, 100))
    timed.timer.received([chunk(1, 0, 100)])
    timed.timer.begin(timed.stream, waits_inside=False)
    timed.timer.received([chunk(2, 0, 100)])
    timed.timer.forget()
    timed.timer.end(timed.stream)
    run_pass(timed)
    timed.stream.reach(1.0, 2.0, 3.0, 4.0)
    assert timed.timer.take() == ()
