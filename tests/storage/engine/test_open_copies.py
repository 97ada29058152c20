"""Storage touches a host slot only when no copy reads or fills it any more."""

from fastdeploy_kvcache_v1.metadata import EVICT, SWAP_IN, CacheSwapMetadata, SwapStep, TransferResult
from fastdeploy_kvcache_v1.storage.engine.open_copies import OpenCopies


def step(number, out=(), into=()):
    """Host slots that are filled, and read."""
    evict = CacheSwapMetadata(*EVICT, tuple(range(len(out))), tuple(out))
    swap_in = CacheSwapMetadata(*SWAP_IN, tuple(into), tuple(range(len(into))))
    return SwapStep.of(number, evict, swap_in)


def result(number, kind, error=None):
    return TransferResult(number, *kind, 1, 1, 0.1, (0,) if error else (), error)


def test_a_step_has_ended_when_every_rank_has_reported_each_of_its_copies():
    copies = OpenCopies(2)
    assert copies.have_ended(-1)
    copies.told(step(0, out=[5], into=[6]))
    assert not copies.have_ended(0)
    assert copies.reported(result(0, EVICT)) == ()
    assert copies.reported(result(0, EVICT)) == [5]
    assert not copies.have_ended(0)
    copies.reported(result(0, SWAP_IN))
    assert not copies.have_ended(0)
    copies.reported(result(0, SWAP_IN))
    assert copies.have_ended(0)


def test_a_step_that_was_not_told_has_not_ended():
    copies = OpenCopies(1)
    copies.told(step(0))
    assert copies.have_ended(0)
    assert not copies.have_ended(1)


def test_an_older_step_that_still_copies_keeps_the_later_ones_open():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5]))
    copies.told(step(1, out=[6]))
    copies.reported(result(1, EVICT))
    assert not copies.have_ended(1)
    copies.reported(result(0, EVICT))
    assert copies.have_ended(1)


def test_what_failed_on_one_rank_is_not_filled():
    copies = OpenCopies(2)
    copies.told(step(0, out=[5]))
    copies.reported(result(0, EVICT, error="ECC"))
    assert copies.reported(result(0, EVICT)) == ()
    assert copies.have_ended(0)


def test_a_slot_that_a_later_step_fills_is_not_filled_by_the_earlier_one():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5, 6]))
    copies.told(step(1, out=[6]))
    assert copies.reported(result(0, EVICT)) == [5]
    copies.told(step(2, out=[5]))
    assert copies.still_filled(0, {5}) == frozenset()


def test_reports_of_a_worker_that_is_gone_are_ignored():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5]))
    copies.forget()
    assert copies.have_ended(0)
    assert copies.reported(result(0, EVICT)) == ()
