"""A store that fails again and again is asked ever more rarely, and as before once it works."""

from fastdeploy_kvcache_v1.storage.engine.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def opened():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        assert breaker.may_pass()
        breaker.failed("no route")
    return clock, breaker


def test_after_the_pause_one_may_try():
    clock, breaker = opened()
    clock.now += FIRST_PAUSE_S
    assert breaker.may_pass()
    assert not breaker.may_pass(), "the others wait for its result"
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.may_pass()


def test_every_failed_try_doubles_the_pause_up_to_a_limit():
    clock, breaker = opened()
    pauses = []
    for _ in range(8):
        pause = 0.0
        while not breaker.may_pass():
            clock.now += 0.5
            pause += 0.5
        pauses.append(pause)
        breaker.failed("no route")
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses[-1] == LONGEST_PAUSE_S
    breaker.succeeded()
    for _ in range(3):
        breaker.failed("no route")
    assert breaker.seconds_left() == FIRST_PAUSE_S
