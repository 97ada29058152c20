"""New cache tensors are filled on the compute stream, and whoever uses a slot of them comes after the fill."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import LayerSwapTimeoutError
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import LIMIT_S, Gates, NumpyBackend, Rig, evict, swap_in

pytestmark = pytest.mark.usefixtures("cpu_ops")

COMPUTE = "compute"


class FillingBackend(NumpyBackend):
    """Its tensors are there at once, and their zeros some time later, as those of Paddle on a GPU."""

    def __init__(self, runtime):
        super().__init__()
        self._runtime = runtime

    def create_kv_cache(self, num_blocks, *, rank=0, device=0):
        caches = super().create_kv_cache(num_blocks, rank=rank, device=device)
        for array in self.arrays:
            self._runtime.compute_stream.submit(array.fill, 0)
        return caches


@pytest.fixture
def gates():
    return Gates()


def make(gates):
    """A rig whose tensors are still being filled, and what lets the fill go on."""
    runtime = CpuRuntime(delay=gates, threaded_compute=True)
    open_gate = gates.close(COMPUTE)
    rig = Rig(runtime, backend=FillingBackend(runtime))
    assert gates.reached.acquire(timeout=LIMIT_S)
    return rig, open_gate


def again(rig, gates):
    """The same after tensors were dropped and made anew, in the same host memory: a wakeup, or new weights."""
    rig.controller.free(keep_host_memory=True)
    open_gate = gates.close(COMPUTE)
    rig.caches = rig.controller.initialize_kv_cache(rig.num_device, rig.num_host)
    rig.arrays = rig.backend.arrays
    assert gates.reached.acquire(timeout=LIMIT_S)
    return open_gate


@pytest.mark.parametrize("is_first", [True, False])
def test_a_swap_in_waits_for_the_fill_of_its_tensors(gates, is_first):
    rig, open_gate = make(gates)
    if not is_first:
        open_gate()
        open_gate = again(rig, gates)
    rig.controller.host_pool.block(0)[:] = 7
    counter = rig.submit(into=swap_in((0,), (2,)))
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.drain(0.2)
    assert counter.num_layers_done == 0
    open_gate()
    counter.wait_all()
    rig.controller.drain(LIMIT_S)
    rig.runtime.compute_stream.synchronize()
    assert all((array[2] == 7).all() and not array[3].any() for array in rig.arrays)
    rig.close()


def test_a_copy_out_of_new_tensors_waits_for_their_fill(gates):
    rig, open_gate = make(gates)
    for array in rig.arrays:
        array[:] = 9  # what was in the memory before
    rig.submit(evict((1,), (0,)))
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.drain(0.2)
    open_gate()
    rig.controller.drain(LIMIT_S)
    assert not rig.controller.host_pool.block(0).any()
    rig.close()


def test_who_fills_or_reads_slots_from_outside_is_told_of_the_fill(gates):
    """Peers ask the table on the worker's thread (`FetchDesk`), stores ask for late writes on threads of their own."""
    rig, open_gate = make(gates)
    table = rig.controller.device_hazards
    (wait,) = table.before(Actor.REMOTE, writes=(3,))
    assert [each.event for each in table.before(Actor.REMOTE, reads=(0, 5))] == [wait.event]
    assert rig.controller.late_writes((3,)) == [wait.event]
    open_gate()
    assert wait.event.wait_done(LIMIT_S)
    assert not any(array.any() for array in rig.arrays)
    assert table.before(Actor.REMOTE, writes=(3,)) == rig.controller.late_writes((3,)) == []
    rig.close()


def test_a_pass_does_not_wait_for_the_fill_that_its_own_stream_runs(gates):
    rig, open_gate = make(gates)
    rig.controller.before_compute((), (1,))
    rig.controller.after_compute((), (1,))
    open_gate()
    rig.close()


def test_later_steps_ask_nothing_about_a_fill_that_has_ended(gates):
    rig, open_gate = make(gates)
    open_gate()
    rig.runtime.compute_stream.synchronize()
    open_gate = gates.close(COMPUTE)
    rig.runtime.compute_stream.submit(lambda: None)
    rig.controller.after_compute((), (1,))  # a pass that runs on and on, as there is always one on a busy GPU
    table = rig.controller.device_hazards
    assert [*table.conflicts(Actor.INPUT, (), (2,))] == [], "of whatever use, ended or not"
    open_gate()
    rig.close()
