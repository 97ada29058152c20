"""The host pool's layout: block-major, every byte of a block in one place."""

from __future__ import annotations

import dataclasses
import mmap
import os

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, InvariantError
from fastdeploy_kvcache_v1.worker.host_pool import HostPool
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import NumpyBackend

pytestmark = pytest.mark.usefixtures("cpu_ops")

LAYOUT = NumpyBackend(num_layers=3).layout


@pytest.fixture
def pool():
    pool = HostPool(LAYOUT, 5, CpuRuntime())
    yield pool
    pool.free()


def test_a_shared_pool_is_mapped_by_other_processes():
    pool = HostPool(LAYOUT, 5, CpuRuntime(), trailer_bytes=64)
    file = pool.buffer.file
    with mmap.mmap(file, 5 * pool.slot_bytes) as other:
        pool.slot(3)[:] = 7
        other[4 * pool.slot_bytes] = 9
        assert other[3 * pool.slot_bytes : 4 * pool.slot_bytes] == bytes([7]) * pool.slot_bytes
        assert pool.slot(4)[0] == 9
        pool.check()
    pool.free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    with pytest.raises(CacheStateError, match="no memory"):
        pool.buffer  # noqa: B018


def test_a_block_is_one_range_of_layer_role_bytes(pool):
    for layer, roles in enumerate(pool.layers):
        for role, rows in enumerate(roles):
            assert (rows.num_rows, rows.row_bytes, rows.pitch) == (5, (16, 24)[role], LAYOUT.block_bytes)
            for slot in range(5):
                rows.array[slot] = 40 * slot + 10 * layer + role + 1
    for slot in range(5):
        expected = [40 * slot + 10 * layer + role + 1 for layer in range(3) for role in range(2)]
        assert (pool.slot(slot) == np.repeat(np.array(expected, np.uint8), [16, 24] * 3)).all()
    assert pool.nbytes == 5 * LAYOUT.block_bytes
    pool.check()


def test_a_block_view_is_writable_and_bounded(pool):
    pool.slot(4)[:16] = 7
    assert (pool.layers[0][0].array[4] == 7).all()
    assert not pool.slot(3).any()
    for slot in (5, -1):
        with pytest.raises(CacheStateError, match=f"host slot {slot}"):
            pool.slot(slot)


def test_empty_or_freed_pool_has_no_slots(pool):
    empty = HostPool(LAYOUT, 0, CpuRuntime())
    pool.free()
    for nothing in (empty, pool):
        nothing.check()
        nothing.free()
        assert nothing.layers == ()
        with pytest.raises(CacheStateError):
            nothing.slot(0)


def test_bad_sizes_and_damage_are_seen(pool):
    with pytest.raises(CacheStateError, match="-1 blocks"):
        HostPool(LAYOUT, -1, CpuRuntime())
    with pytest.raises(ConfigError, match="swap space"):
        HostPool(LAYOUT, 1 << 50, CpuRuntime())
    pool.num_blocks = 4
    with pytest.raises(InvariantError, match="its layout says"):
        pool.check()


@pytest.mark.parametrize(("first", "pitch"), [(1, 0), (0, 1)])
def test_check_sees_rows_that_are_elsewhere(pool, monkeypatch, first, pitch):
    (key, value), *others = pool.layers
    moved = dataclasses.replace(value, address=value.address + first, pitch=value.pitch + pitch)
    monkeypatch.setattr(pool, "layers", ((key, moved), *others))
    with pytest.raises(InvariantError, match="host rows start at"):
        pool.check()
