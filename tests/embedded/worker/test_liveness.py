"""Slow is not stuck: what counts as progress, and when its absence is told."""

import pytest

from fastdeploy_kvcache_v1.embedded.worker import liveness
from fastdeploy_kvcache_v1.embedded.worker.liveness import TELL_EVERY_S, Progress, ProgressTeller, Watchdog

NOTHING = Progress()


def looks(watchdog, count, progress=NOTHING, *, step=None, start=0.0, tick=0.5):
    """The answers to `count` looks at an unchanging worker, half a second apart."""
    return [watchdog.look(start + index * tick, progress, step=step) for index in range(count)]


def test_step_without_progress_is_told_with_its_number_and_time():
    assert looks(Watchdog(2.0), 6, step=7) == [None] * 4 + [
        "step 7 has computed nothing for 2 s",
        "step 7 has computed nothing for 2 s",
    ]


def test_copy_that_does_not_end_is_told_while_steps_go_on():
    watchdog = Watchdog(2.0)
    answers = [watchdog.look(second, Progress(second, 3, oldest_copy=5), step=second) for second in range(4)]
    stuck = "the copy of swap step 5 has not ended for"
    assert answers == [None, None, f"{stuck} 2 s", f"{stuck} 3 s"]


LIVES = {
    "idle": lambda second: (NOTHING, None),
    "one long step of many layers": lambda second: (Progress(computed=second), 1),
    "many short steps": lambda second: (NOTHING, second),
    "many slow copies": lambda second: (Progress(copies_ended=second, oldest_copy=5), None),
    "copies long ended": lambda second: (Progress(copies_ended=3), None),
    "others compute": lambda second: (Progress(waits_for_ranks=True), 1),
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_whoever_gets_on_is_never_stuck(life):
    watchdog = Watchdog(2.0)
    for second in range(100):
        progress, step = life(second)
        assert watchdog.look(second, progress, step=step) is None


def test_progress_starts_the_time_anew():
    watchdog = Watchdog(2.0)
    assert looks(watchdog, 4, step=7) == [None] * 4
    assert looks(watchdog, 4, Progress(computed=1), step=7, start=2.0) == [None] * 4


def test_time_in_which_the_engine_itself_stood_still_does_not_count():
    watchdog = Watchdog(2.0)
    assert watchdog.look(0.0, NOTHING, step=7) is None
    assert watchdog.look(1000.0, NOTHING, step=7) is None
    assert watchdog.look(1000.5, NOTHING, step=7) is None
    assert watchdog.look(1001.0, NOTHING, step=7) == "step 7 has computed nothing for 2 s"


def test_no_limit_never_tells():
    assert looks(Watchdog(0.0), 50, step=7, tick=1.0) == [None] * 50


def test_a_worker_tells_at_once_but_for_what_it_computes(monkeypatch):
    now, told = [10.0], []
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    teller = ProgressTeller(told.append)
    teller.set_copies(0, -1)
    assert told == [], "it stands so already"
    teller.advance()
    teller.advance()
    teller.set_copies(4, 17)
    teller.set_waits(True)
    teller.advance()
    now[0] += 2 * TELL_EVERY_S
    teller.advance()
    waits = Progress(2, 4, 17, waits_for_ranks=True)
    assert told == [Progress(1), Progress(2, 4, 17), waits, waits._replace(computed=4)]
