"""New cache tensors are filled on the compute stream, and whoever uses a slot of them comes after the fill."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import LayerSwapTimeoutError
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.slot_set import NO_SLOTS, slot_set
from tests.worker.chosen_runtime import ChosenRuntime
from tests.worker.worker_fakes import NumpyBackend, Rig, swap_out

COMPUTE = "compute"


class FillingBackend(NumpyBackend):
    """Its tensors are there at once, and their zeros some time later, as those of Paddle on a GPU."""

    def __init__(self, runtime):
        super().__init__()
        self._runtime = runtime

    def create_kv_cache(self, num_blocks, *, rank=0, device=0):
        caches = super().create_kv_cache(num_blocks, rank=rank, device=device)
        for array in self.arrays:
            array[:] = 9  # what was in the memory before
            self._runtime.compute_stream.submit(array.fill, 0)
        return caches


@pytest.fixture
def rig():
    """Its tensors are still being filled."""
    runtime = ChosenRuntime(late_compute=True)
    runtime.hold(COMPUTE)
    rig = Rig(runtime, backend=FillingBackend(runtime))
    yield rig
    rig.runtime.held.clear()
    rig.close()


def test_a_copy_out_of_new_tensors_waits_for_their_fill(rig):
    rig.submit(swap_out((1,), (0,)))
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.transfers.drain(0.2)
    rig.runtime.held.clear()
    rig.controller.transfers.drain()
    assert not rig.controller.host_pool.slot(0).any()


def test_readers_and_writers_from_outside_wait_for_the_fill_of_new_tensors(rig):
    """Peers ask the table on the worker's thread (`FetchDesk`), stores ask for late writes on threads of their own."""
    table = rig.controller.transfers.device_hazards
    (wait,) = table.before(Actor.REMOTE, writes=(3,))
    assert [each.event for each in table.before(Actor.REMOTE, reads=(0, 5))] == [wait.event]
    assert rig.controller.transfers.late_writes((3,)) == [wait.event]
    rig.runtime.held.clear()
    assert wait.event.wait_done()
    assert not any(array.any() for array in rig.arrays)
    assert table.before(Actor.REMOTE, writes=(3,)) == rig.controller.transfers.late_writes((3,)) == []


def test_a_pass_does_not_wait_for_the_fill_that_its_own_stream_runs(rig):
    rig.controller.transfers.before_compute((), (1,))
    rig.controller.transfers.after_compute((), (1,))


def test_later_steps_ask_nothing_about_a_fill_that_has_ended(rig):
    rig.runtime.held.clear()
    rig.runtime.compute_stream.synchronize()
    rig.runtime.hold(COMPUTE)
    rig.controller.transfers.after_compute((), (1,))  # a pass that runs on and on, as there is always one on a busy GPU
    table = rig.controller.transfers.device_hazards
    assert [*table._conflicts(Actor.SWAP_IN, NO_SLOTS, slot_set([2]))] == [], "of whatever use, ended or not"
