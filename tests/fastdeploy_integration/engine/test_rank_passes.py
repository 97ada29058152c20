"""When a device slot may be given to the store, by what worker ranks say of their passes."""

import pytest

from fastdeploy_kvcache_v1.contract.messages import PassProgress
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.rank_passes import RankPasses
from tests.world.streams import Clock

IDLE = True


@pytest.fixture
def passes():
    """At 100 s, when step 7 has been told."""
    clock = Clock()
    clock.now = 100.0
    passes = RankPasses(2, clock)
    passes.told(7, computes=True)
    return passes


def say(passes, *progress):
    for rank, each in enumerate(progress):
        passes.reported(rank, PassProgress(*each))


@pytest.mark.parametrize(
    ("slow_rank", "is_quiet"), [((7, 101.0), True), ((6, 101.0), False), ((7, 100.9), False), ((8, 200.0), True)]
)
def test_the_slowest_rank_decides_by_step_and_by_time(passes, slow_rank, is_quiet):
    for order in ((slow_rank, (9, 300.0)), ((9, 300.0), slow_rank)):
        say(passes, *order)
        assert passes.have_ended(7, 101.0) is is_quiet


@pytest.mark.parametrize(
    # What the two ranks say after a doubt; then both say (7, 500.0).
    ("progress", "is_known"),
    [
        (((7, 300.0), (7, 300.0)), False),
        (((7, 300.0), (8, 300.0)), False),
        (((8, 300.0), (8, 300.0)), True),
        # a rank that is idle since, and that no batch is on its way to
        (((7, 100.0, IDLE), (8, 100.0)), True),
        (((7, 99.9, IDLE), (8, 100.0)), False),
        (((6, 100.0, IDLE), (8, 100.0)), False),
    ],
)
def test_what_is_doubted_is_known_with_the_next_step_or_by_a_rank_that_is_idle(passes, progress, is_known):
    passes.doubt()
    assert passes.are_doubted
    assert not passes.have_ended(7, 90.0)
    say(passes, *progress)
    assert passes.are_doubted is not is_known
    say(passes, (7, 500.0), (7, 500.0))
    assert passes.have_ended(7, 90.0) is is_known


def test_two_doubts_before_the_first_step_are_over_with_it():
    passes = RankPasses(1, Clock())
    for _ in range(2):
        passes.doubt()
    say(passes, (0, 200.0))
    assert passes.have_ended(0, 150.0)


def test_rows_that_the_engine_has_forgotten_end_only_when_a_rank_is_idle(passes):
    passes.doubt(rows_stay=True)
    passes.doubt()  # a reset does not make it better
    passes.told(8, computes=True)
    passes._clock.now = 110.0
    say(passes, (8, 120.0), (8, 120.0))
    assert not passes.have_ended(7, 90.0)
    say(passes, (8, 121.0, IDLE), (8, 121.0))
    assert not passes.have_ended(7, 90.0)
    say(passes, (8, 130.0), (8, 122.0, IDLE))
    assert passes.have_ended(7, 90.0)
