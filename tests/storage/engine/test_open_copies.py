"""Storage touches a host slot only when no copy reads or fills it any more."""

from fastdeploy_kvcache_v1.metadata import (
    EVICT,
    SWAP_IN,
    CacheSwapMetadata,
    SwapStep,
    TransferReport,
    TransferResult,
)
from fastdeploy_kvcache_v1.storage.engine.open_copies import OpenCopies


def step(number, out=(), into=()):
    """Host slots that are filled, and read."""
    evict = CacheSwapMetadata(*EVICT, tuple(range(len(out))), tuple(out))
    swap_in = CacheSwapMetadata(*SWAP_IN, tuple(into), tuple(range(len(into))))
    return SwapStep.of(number, evict, swap_in)


def ended(through, *failed, kind=EVICT):
    return TransferReport(tuple(TransferResult(each, *kind, 1, 1, 0.1, (0,), "ECC") for each in failed), 0.0, through)


def test_a_step_has_ended_when_it_has_on_every_rank():
    copies = OpenCopies(2)
    assert copies.have_ended(-1)
    copies.told(step(0, out=[5], into=[6]))
    assert copies.reported(0, ended(0)) == []
    assert not copies.have_ended(0)
    assert copies.reported(1, ended(-1)) == []
    assert not copies.have_ended(0)
    assert copies.reported(1, ended(0)) == [(0, [5])]
    assert copies.have_ended(0)


def test_a_step_that_was_not_told_has_not_ended():
    copies = OpenCopies(1)
    copies.told(step(0))
    assert copies.have_ended(0)
    assert not copies.have_ended(1)


def test_an_older_step_that_still_copies_keeps_the_later_ones_open():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5]))
    copies.told(step(1))
    assert not copies.have_ended(1)
    copies.reported(0, ended(0))
    assert copies.have_ended(1)


def test_a_report_makes_up_for_one_that_was_lost():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5]))
    copies.told(step(1, into=[7]))
    copies.told(step(2, out=[6]))
    copies.told(step(3, out=[8]))
    assert copies.reported(0, ended(2)) == [(0, [5]), (1, []), (2, [6])]
    assert not copies.have_ended(3)


def test_an_older_report_that_comes_late_changes_nothing():
    copies = OpenCopies(2)
    copies.told(step(0, out=[5]))
    copies.reported(0, ended(0))
    copies.reported(0, ended(-1))
    assert copies.reported(1, ended(0)) == [(0, [5])]


def test_what_failed_on_one_rank_is_not_filled():
    copies = OpenCopies(2)
    copies.told(step(0, out=[5]))
    copies.told(step(1, out=[6]))
    copies.reported(0, ended(0, 0))
    assert copies.reported(1, ended(1)) == [(0, [])]
    assert copies.reported(0, ended(1)) == [(1, [6])]


def test_a_failed_swap_in_leaves_what_the_step_has_filled():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5], into=[6]))
    assert copies.reported(0, ended(0, 0, kind=SWAP_IN)) == [(0, [5])]


def test_a_slot_that_a_later_step_fills_is_not_filled_by_the_earlier_one():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5, 6]))
    copies.told(step(1, out=[6]))
    assert copies.reported(0, ended(0)) == [(0, [5])]
    copies.told(step(2, out=[5]))
    assert copies.still_filled(0, {5}) == frozenset()


def test_what_may_be_lost_on_its_way_is_never_filled_and_open_until_a_later_step_is_known_to_have_arrived():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5]))
    copies.forget_filled(None)
    assert not copies.have_ended(0)
    copies.told(step(1, out=[6]))
    assert copies.reported(0, ended(1)) == [(0, []), (1, [6])]
    assert copies.have_ended(1)


def test_steps_that_may_have_failed_untold_are_not_filled():
    copies = OpenCopies(1)
    for number in range(3):
        copies.told(step(number, out=[number]))
    copies.forget_filled(1)
    assert copies.reported(0, ended(2)) == [(0, []), (1, []), (2, [2])]
