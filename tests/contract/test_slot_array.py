"""SlotArray: a sequence of slots like any other, in one piece."""

import pickle
import random

import pytest

from fastdeploy_kvcache_v1.contract.swap_message import SlotArray


@pytest.mark.parametrize("length", [0, 1, 2, 1000])
def test_slot_array_equals_the_sequence_that_it_was_made_of(length):
    slots = tuple(random.Random(length).randrange(1 << 31) for _ in range(length))
    made = SlotArray.of(slots)
    assert made == slots
    assert slots == made
    assert hash(made) == hash(slots)
    assert [*made] == [*slots]
    assert len(made) == length
    assert bool(made) is bool(slots)
    assert made[1:] == slots[1:]
    assert [made[place] for place in range(length)] == [*slots]
    assert len(made.packed) == 4 * length


def test_slot_array_differs_from_other_orders_and_other_types():
    assert SlotArray.of([1, 2]) != SlotArray.of([2, 1])
    assert SlotArray.of([1, 2]) != (2, 1)
    assert SlotArray.of([1, 2]) != {1, 2}


def test_slot_array_is_reused_by_of_and_can_be_pickled():
    made = SlotArray.of(range(5))
    assert SlotArray.of(made) is made
    assert pickle.loads(pickle.dumps(made)) == made
    assert eval(repr(made)) == made


@pytest.mark.parametrize(("slot", "error"), [("3", TypeError), (1.0, TypeError), (1 << 31, OverflowError)])
def test_a_slot_that_is_no_small_integer_is_refused(slot, error):
    with pytest.raises(error):
        SlotArray.of([slot])
