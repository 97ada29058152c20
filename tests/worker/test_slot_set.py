"""`SlotSet` against `frozenset`."""

import random

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.slot_set import SlotSet


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 500])
@pytest.mark.parametrize("kind", [tuple, set, iter])
def test_it_is_the_set_of_its_slots(size, kind):
    rng = random.Random(size)
    first, second = (frozenset(rng.choices(range(1000), k=size)) for _ in range(2))
    ours, other = SlotSet.of(kind(first)), SlotSet.of(kind(second))
    assert ours == first
    assert (ours == other) is (first == second)
    assert list(ours) == sorted(first)
    assert len(ours) == len(first)
    assert bool(ours) is bool(first)
    assert [slot for slot in range(-3, 1003) if slot in ours] == sorted(first)
    assert ours | other == first | second
    assert ours & second == first & second
    assert ours - other == first - second
    assert second - ours == second - first
    assert second | ours == ours ^ second | first & second == first | second
    assert ours.isdisjoint(second) is first.isdisjoint(second)
    assert SlotSet.of(ours) is ours
    assert len({ours, SlotSet.of(first)}) == 1
    assert repr(ours) == f"SlotSet({sorted(first)})"


@pytest.mark.parametrize("slots", [(-1,), (*range(20), -5)])
def test_a_negative_slot_is_refused(slots):
    with pytest.raises(CacheStateError, match="not negative"):
        SlotSet.of(slots)
