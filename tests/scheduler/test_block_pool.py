from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.contract.messages import DeviceSlot, HostSlot
from fastdeploy_kvcache_v1.errors import BlockPoolError, InvariantError
from fastdeploy_kvcache_v1.scheduler.block_pool import BlockPool


@given(st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_against_a_set(size: int, actions: list[tuple[bool, int]]) -> None:
    pool: BlockPool[int] = BlockPool("device", size)
    owned: list[int] = []
    for take, count in actions:
        if take and count <= pool.num_free:
            slots = pool.allocate(count)
            assert len(slots) == count
            assert set(slots).isdisjoint(owned)
            owned += slots
        elif take:
            with pytest.raises(BlockPoolError, match="free"):
                pool.allocate(count)
        else:
            pool.free(owned[:count])
            del owned[:count]
        assert pool.num_free == size - len(owned)
        assert pool.owned_slots() == set(owned)
        pool.check()


def test_slots_are_ascending_and_last_freed_first_reused() -> None:
    pool = BlockPool[HostSlot]("host", 8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    pool.free([1, 2])
    assert pool.allocate(3) == [1, 2, 5]


def test_more_slots_than_have_an_owner_are_not_freed() -> None:
    pool = BlockPool[DeviceSlot]("device", 8)
    slots = pool.allocate(3)
    with pytest.raises(BlockPoolError, match="device pool: 4 slots are freed, 3 have an owner"):
        pool.free([*slots, slots[0]])
    assert pool.owned_slots() == {0, 1, 2}
    pool.free(slots)
    with pytest.raises(BlockPoolError):
        pool.free(slots[:1])
    pool.check()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [([5], "free list twice"), ([0, 0], "free list twice"), ([8], "out of range"), ([-1], "out of range")],
)
def test_slots_that_are_freed_wrongly_are_found_by_a_check(wrong: list[DeviceSlot], said: str) -> None:
    pool = BlockPool[DeviceSlot]("device", 8)
    pool.allocate(3)
    pool.free(wrong)
    with pytest.raises(InvariantError, match=said):
        pool.check()


def test_a_held_slot_stays_until_its_last_reader_releases_it() -> None:
    pool = BlockPool[DeviceSlot]("device", 4)
    slots = pool.allocate(3)
    pool.hold(slots[:2])
    pool.hold(slots[:1])
    pool.free(slots)
    assert (pool.num_free, pool.num_owned, pool.num_held) == (2, 0, 0)
    with pytest.raises(AssertionError, match="has an owner"):
        pool.hold(slots[:1])
    pool.release_held(slots[:2])
    assert pool.num_free == 3
    pool.release_held(slots[:1])
    assert pool.num_free == 4
    pool.check()


def test_resize() -> None:
    pool = BlockPool[DeviceSlot]("device", 4)
    pool.allocate(2)
    pool.resize(2)
    assert pool.num_free == 0
    pool.resize(5)
    pool.check()
    assert pool.allocate(3) == [2, 3, 4]
    with pytest.raises(AssertionError, match="must be free"):
        pool.resize(2)
    assert pool.size == 5
    pool.check()


def test_keeping_some_slots_frees_the_others_in_ascending_order() -> None:
    pool = BlockPool[HostSlot]("host", 6)
    pool.allocate(5)
    pool.keep_only([HostSlot(1), HostSlot(3)])
    pool.check()
    assert pool.owned_slots() == {1, 3}
    assert pool.allocate(4) == [0, 2, 4, 5]


@pytest.mark.parametrize("wrong", [4, 6, -1])
def test_only_owned_slots_can_be_kept(wrong: int) -> None:
    pool = BlockPool[HostSlot]("host", 6)
    pool.allocate(3)
    with pytest.raises(BlockPoolError, match="cannot be kept"):
        pool.keep_only([HostSlot(0), HostSlot(wrong)])
    assert pool.owned_slots() == {0, 1, 2}
