"""What a rank tells of its passes, and how often."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.worker.pass_tracker import EVERY_S, IDLE_EVERY_S, PassTracker
from fastdeploy_kvcache_v1.metadata import PassProgress


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
