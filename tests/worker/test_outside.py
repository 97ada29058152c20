"""Device slots that something outside the copies fills: the SDK of a store, for example."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import LIMIT_S, Gates, Rig, evict, swap_in

pytestmark = pytest.mark.usefixtures("cpu_ops")

INPUT = "kv-input"


@pytest.fixture
def gates():
    return Gates()


def make(gates, **options):
    return Rig(CpuRuntime(delay=gates), **options)


def test_a_slot_whose_copy_failed_can_be_read_once_it_was_filled_from_outside(gates):
    rig = make(gates)
    gates.fail_next(INPUT, RuntimeError("ECC"))
    rig.submit(into=swap_in((0, 1), (2, 3)))
    rig.controller.drain(LIMIT_S)
    with pytest.raises(TransferError):
        rig.controller.before_compute([2], [])
    rig.controller.refilled((2,))
    rig.controller.before_compute([2], [])
    rig.controller.after_compute([2], [])
    assert rig.controller.failed_slots([2, 3]) == [3]
    with pytest.raises(TransferError):
        rig.controller.before_compute([3], [])
    rig.close()


def test_a_host_slot_whose_copy_failed_can_be_swapped_in_once_it_was_filled_from_outside(gates):
    rig = make(gates)
    gates.fail_next("kv-output", RuntimeError("ECC"))
    rig.submit(evict((0, 1), (2, 3)))
    rig.controller.drain(LIMIT_S)
    rig.controller.refilled((2,), CacheLevel.HOST)
    rig.submit(into=swap_in((2,), (4,))).wait_all()
    counter = rig.submit(into=swap_in((3,), (5,)))
    with pytest.raises(TransferError):
        counter.wait_all()
    rig.close()


def test_a_copy_that_runs_is_not_forgotten(gates):
    rig = make(gates)
    open_gate = gates.close(INPUT)
    counter = rig.submit(into=swap_in((0,), (2,)))
    assert gates.reached.acquire(timeout=LIMIT_S)
    rig.controller.refilled((2,))
    assert rig.controller.failed_slots([2]) == []
    assert len(rig.controller._transfers._device_hazards) == 1
    open_gate()
    counter.wait_all()
    rig.close()


def test_copies_that_were_given_up_are_known_until_they_end(gates):
    rig = make(gates, timeout_s=0.05)
    open_gate = gates.close(INPUT)
    rig.submit(into=swap_in((0, 1), (2, 3)))
    assert gates.reached.acquire(timeout=LIMIT_S)
    assert rig.controller.late_writes([2]) == [], "nobody has given it up"
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.before_compute([2], [])
    (result,) = rig.controller.take_results()
    assert result.target_slots == (2, 3)
    assert rig.controller.late_writes([4, 5]) == []
    (copy,) = rig.controller.late_writes([3, 4])
    assert not copy.done()
    open_gate()
    assert copy.wait_done(LIMIT_S)
    assert rig.controller.late_writes([2, 3]) == []
    rig.close()


def test_the_device_tier_says_where_its_blocks_are(gates):
    rig = make(gates)
    rows = rig.controller.device_rows
    assert len(rows) == rig.layout.num_layers
    assert [row.address for layer in rows for row in layer] == [array.ctypes.data for array in rig.arrays]
    rig.close()
