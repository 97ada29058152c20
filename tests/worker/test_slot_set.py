"""`SlotSet` against `frozenset`."""

import random

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.slot_set import SlotSet


def array(slots):
    return np.array([*slots], np.int64)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 65, 500])
@pytest.mark.parametrize("ends", [(1000, 1000), (1000, 70_000), (1000, 1 << 40), (1 << 40, 1 << 40)])
@pytest.mark.parametrize("kind", [tuple, set, iter, array])
def test_it_is_the_set_of_its_slots(size, ends, kind):
    """Hash tables, bitmaps, and one beside the other."""
    rng = random.Random(size)
    both = rng.sample(range(1000), size // 2)
    first, second = (frozenset(both).union(rng.choices(range(end), k=size - len(both))) for end in ends)
    ours, other = SlotSet.of(kind(first)), SlotSet.of(kind(second))
    assert ours == first
    assert (ours == other) is (first == second)
    assert list(ours) == sorted(first)
    assert len(ours) == len(first)
    assert bool(ours) is bool(first)
    assert all(slot in ours for slot in first)
    assert [slot for slot in range(-3, 1003) if slot in ours] == sorted(slot for slot in first if slot < 1003)
    assert ours | other == first | second
    assert ours & second == first & second
    assert ours - other == first - second
    assert second - ours == second - first
    assert second | ours == ours ^ second | first & second == first | second
    assert ours.isdisjoint(second) is first.isdisjoint(second)
    assert SlotSet.union((ours, SlotSet(), other, SlotSet.of([3]))) == first | second | {3}
    assert SlotSet.of(ours) is ours
    assert len({ours, SlotSet.of(first)}) == 1
    assert repr(ours) == f"SlotSet({sorted(first)})"


@pytest.mark.parametrize("slots", [(-1,), (*range(20), -5), (*range(100), -5)])
def test_a_negative_slot_is_refused(slots):
    with pytest.raises(CacheStateError, match="not negative"):
        SlotSet.of(slots)
