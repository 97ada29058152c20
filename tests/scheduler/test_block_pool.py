from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.contract.messages import DeviceSlot, HostSlot
from fastdeploy_kvcache_v1.errors import BlockPoolError
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


@pytest.mark.parametrize("wrong", [[5], [0, 0], [8], [0, 99], [-1], [-8], [1, 5]])
def test_wrong_free_changes_nothing(wrong: list[int]) -> None:
    pool = BlockPool[DeviceSlot]("device", 8)
    pool.allocate(3)
    with pytest.raises(BlockPoolError, match="device pool"):
        pool.free(wrong)  # type: ignore[arg-type]
    assert pool.num_free == 5
    assert pool.owned_slots() == {0, 1, 2}
    pool.check()
    pool.free([0, 1, 2])  # type: ignore[list-item]
    with pytest.raises(BlockPoolError):
        pool.free([0])  # type: ignore[list-item]


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
