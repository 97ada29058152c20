"""`slot_set`: sets of slots from whatever names them."""

import random

import numpy as np
import pytest

from fastdeploy_kvcache_v1.contract.swap_message import SlotArray
from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.slot_set import SlotSet, slot_set


def array(slots):
    return np.array([*slots], np.int64)


@pytest.mark.parametrize("size", [0, 1, 9, 500])
@pytest.mark.parametrize("end", [1000, 1 << 31])
@pytest.mark.parametrize("kind", [tuple, set, iter, array, SlotArray.of])
def test_slot_set_equals_the_set_of_its_slots(size, end, kind):
    slots = random.Random(size).choices(range(end), k=size)
    ours = slot_set(kind(slots))
    assert isinstance(ours, SlotSet)
    assert [*ours] == sorted({*slots})
    assert ours == slot_set(reversed(slots))
    assert slot_set(ours) is ours


@pytest.mark.parametrize("slots", [(-1,), (*range(100), -5), (3, 1 << 32), array([7, 1 << 40])])
def test_slot_out_of_range_is_refused(slots):
    with pytest.raises(CacheStateError, match=r"slots are in \[0, 4294967296\), got "):
        slot_set(slots)
