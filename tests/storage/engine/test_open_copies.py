"""What storage may not take for filled. When it touches a slot at all, the world and test_tier show."""

from fastdeploy_kvcache_v1.contract.messages import SWAP_OUT, BlockCopies, CopyResult, SwapStep, WorkerReport
from fastdeploy_kvcache_v1.storage.engine.open_copies import OpenCopies


def step(number, out):
    """Host slots that are filled."""
    return SwapStep(number, (BlockCopies(*SWAP_OUT, tuple(range(len(out))), tuple(out)),))


def ended(through, *failed):
    return WorkerReport(tuple(CopyResult(each, *SWAP_OUT, 1, 1, 0.1, (0,), "ECC") for each in failed), 0.0, through)


def test_what_failed_on_one_rank_is_not_filled():
    copies = OpenCopies(2)
    copies.told(step(0, out=[5]))
    copies.told(step(1, out=[6]))
    copies.reported(0, ended(0, 0))
    assert copies.reported(1, ended(1)) == [(0, [])]
    assert copies.reported(0, ended(1)) == [(1, [6])]


def test_slot_that_a_later_step_fills_is_not_filled_by_the_earlier_one():
    copies = OpenCopies(1)
    copies.told(step(0, out=[5, 6]))
    copies.told(step(1, out=[5]))
    assert copies.reported(0, ended(1)) == [(0, [6]), (1, [5])]
    assert copies.still_filled(0, [5, 6]) == {6}


def test_step_that_may_be_lost_stays_open_until_a_later_step_arrives():
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
