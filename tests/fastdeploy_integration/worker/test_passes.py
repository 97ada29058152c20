"""What a rank tells of its passes: how often that they have ended, and how long those took that compute prompts."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.contract.messages import PassProgress
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.passes import EVERY_S, IDLE_EVERY_S, PassTracker, PrefillTimer
from tests.lab.fastdeploy_cpu.host_tasks import ABORT, DECODE, EXTEND, PREEMPTED, other, prefill
from tests.world.streams import Clock, VirtualDevice, VirtualStream


class Passes:
    """Of a tracker: each ends when the test says so."""

    def __init__(self):
        self.now = 50.0
        self.tracker = PassTracker(lambda: self.now)

    def submit(self):
        event = SimpleNamespace(is_over=False)
        event.done = lambda: event.is_over
        self.tracker.submitted(event)
        return event

    def news(self, *, is_idle=False):
        return self.tracker.news(is_idle=is_idle)


@pytest.fixture
def passes():
    return Passes()


def test_a_pass_counts_when_it_has_ended_with_the_step_and_time_of_its_submission(passes):
    passes.tracker.taken(3)
    first = passes.submit()
    passes.now = 51.0
    passes.tracker.taken(4)
    second = passes.submit()
    passes.now = 60.0
    assert passes.news() is None
    first.is_over = True
    assert passes.news() == PassProgress(3, 50.0)
    assert passes.news() is None, "it is said once"
    second.is_over = True
    assert passes.news() == PassProgress(4, 51.0)


def test_passes_alone_are_told_now_and_then(passes):
    told = []
    for _ in range(100):
        passes.now += EVERY_S / 10
        passes.submit().is_over = True
        told.append(passes.news())
    times = [each.at for each in told if each is not None]
    assert len(times) == 10
    assert times[0] < times[-1]


def test_a_rank_is_idle_when_its_last_pass_has_ended(passes):
    last = passes.submit()
    assert passes.news(is_idle=True) is None
    last.is_over = True
    passes.now = 52.0
    assert passes.news(is_idle=True) == PassProgress(-1, 52.0, True)
    passes.now += IDLE_EVERY_S / 2
    assert passes.news(is_idle=True) is None
    passes.now += IDLE_EVERY_S / 2
    assert passes.news(is_idle=True) == PassProgress(-1, passes.now, True), "again, in case that is asked by now"
    passes.tracker.taken(0)
    assert passes.news(is_idle=True) == PassProgress(0, passes.now, True), "a batch without rows to compute"


def test_an_end_of_idleness_is_told_at_once(passes):
    assert passes.news(is_idle=True).is_idle
    passes.now += 0.001
    passes.submit().is_over = True
    assert passes.news() == PassProgress(-1, passes.now)


def test_passes_over_tensors_that_go_have_ended(passes):
    passes.submit()
    passes.tracker.forget()
    assert passes.news(is_idle=True).is_idle


# ---- which passes are timed, and what for


@pytest.fixture
def timed():
    """A device that gets to what is recorded when the test says so."""
    stream = VirtualDevice(Clock()).compute_stream

    def record_event(*, timed):
        assert timed
        return VirtualStream.record_event(stream)

    def reach(*times):
        for stream.device.clock.now in times:
            stream.run()

    stream.record_event = record_event
    return SimpleNamespace(timer=PrefillTimer(), stream=stream, reach=reach)


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
        for task in tasks[:-1]:
            timed.timer.received([task])
        run_pass(timed, *tasks[-1:], waits_inside=waits_inside)
    assert len(timed.stream.waiting) == 2 * len(told)
    timed.reach(1.0, 2.0)
    assert [each.num_tokens for each in timed.timer.take()] == told


def test_a_pass_that_failed_says_nothing(timed):
    timed.timer.received([chunk(0, 0, 100)])
    timed.timer.begin(timed.stream, waits_inside=False)  # it raises then, and is never ended
    run_pass(timed, chunk(1, 0, 40))
    timed.reach(1.0, 2.0, 3.0)
    assert [each.num_tokens for each in timed.timer.take()] == [40]
    timed.stream._failure = RuntimeError("Xid 31")
    run_pass(timed, chunk(1, 40, 80))
    timed.reach(4.0, 5.0)
    assert timed.timer.take() == ()


def test_what_is_forgotten_is_never_told(timed):
    run_pass(timed, chunk(0, 0, 100))
    timed.timer.received([chunk(1, 0, 100)])
    timed.timer.begin(timed.stream, waits_inside=False)
    timed.timer.received([chunk(2, 0, 100)])
    timed.timer.forget()
    timed.timer.end(timed.stream)
    run_pass(timed)
    timed.reach(1.0, 2.0, 3.0, 4.0)
    assert timed.timer.take() == ()
