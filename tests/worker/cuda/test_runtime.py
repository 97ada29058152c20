"""What is special about the CuPy runtime, over a driver in Python: what is called, on which stream, in what order.

Nothing in this file shows that CUDA does what its documentation says.
"""

from __future__ import annotations

import os
from functools import partial, partialmethod
from itertools import count
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.contract.messages import CacheLevel, CopyPath
from fastdeploy_kvcache_v1.errors import ConfigError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.worker.cuda import runtime as cuda_runtime
from fastdeploy_kvcache_v1.worker.cuda.rates import Rates
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent
from fastdeploy_kvcache_v1.worker.runtime.placement import cpus_near
from tests.gpu.stand_in.fake_driver import COMPUTE
from tests.gpu.tensor import Tensor
from tests.worker.ops.copies import only
from tests.worker.worker_fakes import NumpyBackend, Rig, swap_in, swap_out


class GpuBackend(NumpyBackend):
    """Cache tensors in GPU memory."""

    def __init__(self, gpu, num_layers=2):
        super().__init__(num_layers)
        self._gpu = gpu

    def create_kv_cache(self, num_blocks, *, rank=0, device=0):
        def tensor(array):
            data = SimpleNamespace(ptr=self._gpu.adopt(array))
            return Tensor(SimpleNamespace(shape=array.shape, dtype=array.dtype, data=data))

        arrays = super().create_kv_cache(num_blocks, rank=rank, device=device)
        return {name: tensor(array) for name, array in arrays.items()}


@pytest.fixture
def rig(gpu):
    return Rig(CudaRuntime(device=0, compute_handle=COMPUTE), backend=GpuBackend(gpu))


def test_calls_of_one_step(gpu, rig):
    """Evict slot 0 to host 2, swap host 2 into device 1: the input stream waits on the device for the output stream."""
    gpu.progress_on_query = False
    gpu.log.clear()
    counter = rig.submit(swap_out((0,), (2,)), swap_in((2,), (1,)))
    rig.controller.transfers.before_compute([1], [], counter=counter)
    for layer in range(2):
        counter.wait_for_layer(layer)
    rig.controller.transfers.after_compute([1], [])

    output, into = [entry[1] for entry in gpu.log if entry[0] == "stream"]
    out_end = [entry for entry in gpu.log if entry[:2] == ("record", output)][-1][2]
    layers = [entry[2] for entry in gpu.log if entry[:2] == ("record", into) and entry[3] == "untimed"]
    shape = [entry[:2] for entry in gpu.log]
    assert shape == [
        *[(what, output) for what in ("stream", "record", *["copy 2D"] * 4, "record")],
        *[(what, into) for what in ("stream", "wait", "record", *["copy 2D", "copy 2D", "record"] * 2, "record")],
        *[(what, COMPUTE) for what in ("wait", "wait", "record")],
    ]
    assert [entry[2] for entry in gpu.log if entry[:2] == ("wait", into)] == [out_end]
    assert [entry[2] for entry in gpu.log if entry[:2] == ("wait", COMPUTE)] == layers
    assert {entry[2] for entry in gpu.log if entry[0] == "stream"} == {"non-blocking"}
    assert rig.controller.transfers.take_results() == [], "nothing has run yet, and nobody was blocked"

    gpu.run_all()
    first, second = rig.controller.transfers.take_results()
    assert (first.target, first.ok, first.seconds) == (CacheLevel.HOST, True, 0.004)
    assert (second.target, second.ok, second.seconds) == (CacheLevel.DEVICE, True, 0.004)
    rig.close()


def test_a_gpu_says_which_ways_of_copying_it_has(rig, monkeypatch):
    monkeypatch.setattr(cuda_runtime.trial, "known", Rates)
    assert rig.runtime.copy_paths() == (CopyPath("in", "spans"), CopyPath("out", "spans"))
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_OPS", "paddle")
    assert rig.runtime.copy_paths() == (CopyPath("in", "paddle"), CopyPath("out", "paddle"))
    rig.close()


def test_event_without_references_is_recorded_again(gpu, rig):
    """Who was told to wait for it waits for what was recorded then: see `cuEventRecord`."""
    stream = rig.runtime.new_stream("any")
    held, dropped, timed = stream.record_event(), stream.record_event(), stream.record_event(timed=True)
    used = {event.raw.ptr for event in (held, dropped, timed)}
    spare, spare_timed = dropped.raw.ptr, timed.raw.ptr
    del dropped, timed
    again = stream.record_event()
    assert again.raw.ptr == spare
    assert stream.record_event().raw.ptr not in used
    assert stream.record_event(timed=True).raw.ptr == spare_timed
    assert [entry[3] for entry in gpu.log if entry[0] == "record" and entry[2] == spare_timed] == ["timed"] * 2
    rig.close()


def test_an_error_the_gpu_reports_later_fails_the_transfer(gpu, rig):
    gpu.progress_on_query = False
    rig.submit(swap_out((0,), (0,)))
    gpu.statuses["cuEventQuery"] = 700
    (result,) = rig.controller.transfers.take_results()
    assert "CUDA error 700" in str(result.error)
    assert result.target_slots == (0,)


QUEUED = ("cuStreamWaitEvent", "cuEventRecord", "cuMemcpy2DAsync")


def refuse(gpu, number, names, *, breaks=False):
    """The driver refuses one of its calls of these names, or that one and whatever comes after it."""
    answer, calls = gpu.answer, count()

    def refusing(name, *arguments):
        if name in names and next(calls) == number:
            if not breaks:
                return 2, ()
            gpu.fault(700, "an illegal address")
        return answer(name, *arguments)

    gpu.answer = refusing


@pytest.fixture
def begun(rig):
    """Device slot N holds 10 + N, host slot 4 what device slot 5 has, and both copy streams are there."""
    rig.fill()
    rig.submit(swap_out((5,), (4,)), swap_in((4,), (3,)))
    rig.controller.transfers.drain()
    rig.controller.transfers.take_results()
    return rig


@pytest.mark.parametrize("name", ["cuStreamWaitEvent", "cuEventCreate", "cuEventRecord"])
@pytest.mark.parametrize("number", range(8))
def test_call_that_the_driver_refuses_to_queue_is_waited_for(gpu, begun, name, number):
    """Two slots are evicted, one of them is filled again by the same step, the pass behind it writes the other one."""
    transfers = begun.controller.transfers
    refuse(gpu, number, [name])
    counter = begun.submit(swap_out((0, 2), (1, 2)), swap_in((2, 4), (0, 1)))
    transfers.before_compute([0, 1], [2], counter=counter)
    for layer in range(2):
        counter.wait_for_layer(layer)
    gpu.launch(COMPUTE, partial(begun.write, 2, 77))
    transfers.after_compute([0, 1], [2])
    gpu.run_all()
    assert [result.error for result in transfers.take_results()] == [None, None]
    assert [begun.holds(slot, content) for slot, content in ((0, 12), (1, 15), (2, 77))] == [True] * 3
    begun.close()


@pytest.mark.parametrize("number", range(15))
def test_a_gpu_that_breaks_within_a_step_leaves_no_copy_unknown(gpu, begun, number):
    transfers = begun.controller.transfers
    refuse(gpu, number, QUEUED, breaks=True)
    counter = begun.submit(swap_out((0,), (2,)), swap_in((2,), (1,)))
    assert gpu.broken
    assert transfers.num_unreported == 2
    with pytest.raises(TransferError):
        counter.wait_all()
    assert transfers.failed_slots([1, 2]) == [1]
    out, into = transfers.take_results()
    assert into.target_slots == (1,)
    assert into.error
    assert out.error
    begun.controller.check()


def test_rank_makes_its_gpu_objects_on_its_own_device(gpu, monkeypatch):
    """Whatever GPU another library has made the thread's meanwhile."""

    def strayed(call, *given, **options):
        gpu.device = 0
        return call(*given, **options)

    for name in ("new_stream", "allocate_host", "new_copies", "free_host", "require_memory"):
        monkeypatch.setattr(CudaRuntime, name, partialmethod(partial(strayed, getattr(CudaRuntime, name))))
    rig = Rig(CudaRuntime(1, compute_handle=COMPUTE, rates=only("kernel")), backend=GpuBackend(gpu))
    transfers = rig.controller.transfers
    for _ in range(3):
        counter = strayed(rig.submit, swap_out((0,), (2,)), swap_in((2,), (1,)))
        strayed(transfers.before_compute, [1], [], counter=counter)
        strayed(transfers.after_compute, [1], [])
        gpu.run_all()
        transfers.take_results()  # their events are recorded again
        del counter
    strayed(rig.close)
    assert gpu.devices == {1}
    assert gpu.faults == []


class Lease(CpuEvent):
    """A peer's use of a slot. It ends while somebody waits for it, unless it never does."""

    def __init__(self, gpu, ends=True, error=None):
        super().__init__()
        self._gpu, self._ends, self._failure = gpu, ends, error

    def wait_done(self, timeout=None):
        if self._ends and not self.done():
            self._gpu.log.append(("the lease ends",))
            self.finish(self._failure)
        return super().wait_done(timeout)


def test_use_of_a_slot_leased_to_a_peer_is_submitted_after_the_lease(gpu, rig):
    rig.controller.transfers.device_hazards.after(Actor.REMOTE, Lease(gpu), reads=(3,))
    gpu.log.clear()
    rig.submit(into=swap_in((0,), (3,)))
    names = [entry[0] for entry in gpu.log]
    assert names.index("the lease ends") < names.index("copy 2D")

    rig.controller.transfers.device_hazards.after(Actor.REMOTE, Lease(gpu), reads=(4,))
    gpu.log.clear()
    rig.controller.transfers.before_compute([], [4])
    assert gpu.log == [("the lease ends",)]
    rig.close()


def test_a_peer_that_does_not_end_its_use_is_not_waited_for_for_ever(gpu):
    rig = Rig(CudaRuntime(compute_handle=COMPUTE), backend=GpuBackend(gpu), timeout_s=0.01)
    rig.controller.transfers.device_hazards.after(Actor.REMOTE, Lease(gpu, ends=False), reads=(3,))
    with pytest.raises(LayerSwapTimeoutError, match=r"a peer's use of a slot did not end within 0\.01 s"):
        rig.submit(into=swap_in((0,), (3,)))
    assert not [entry for entry in gpu.log if entry[0] == "copy 2D"]
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.transfers.before_compute([], [3])
    assert rig.controller.transfers.take_results() == []


def test_slot_that_a_peer_failed_to_fill_is_not_read(gpu, rig):
    lost = Lease(gpu, error=OSError("the link is gone"))
    rig.controller.transfers.device_hazards.after(Actor.REMOTE, lost, writes=(3,))
    with pytest.raises(TransferError, match="the link is gone"):
        rig.controller.transfers.before_compute([3], [])
    rig.submit(swap_out((3,), (0,)))
    gpu.run_all()
    (result,) = rig.controller.transfers.take_results()
    assert "the link is gone" in str(result.error)
    rig.close()


def test_a_stream_of_a_thread_is_on_its_device_and_waits_for_no_other_one(gpu, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda.Device, "use", lambda device: gpu.log.append(("device", device.id)))
    stream = cuda_runtime.CudaStream(3, "peer")
    assert gpu.log == [("device", 3), ("stream", stream.handle, "non-blocking")]


def test_compute_is_on_paddles_own_stream_and_is_not_closed(gpu, monkeypatch):
    paddle = pytest.importorskip("paddle")
    monkeypatch.setattr(paddle.device.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=COMPUTE))
    runtime = CudaRuntime()
    assert (runtime.on_gpu, runtime.compute_stream.handle) == (True, COMPUTE)
    runtime.compute_stream.close()
    runtime.compute_stream.record_event()
    runtime.compute_stream.synchronize()


def test_tensors_of_the_wrong_device_are_refused(gpu):
    with pytest.raises(ConfigError, match="not on the device of the runtime"):
        Rig(CudaRuntime(compute_handle=COMPUTE), backend=NumpyBackend())


@pytest.mark.parametrize("shared", [False, True])
def test_each_ranks_host_memory_is_on_the_node_of_its_own_device(gpu, monkeypatch, tmp_path, shared):
    """Four ranks on a machine whose devices 0 and 1 are near node 1, device 2 near node 0, and device 3 nobody knows
    where: there its pages come from wherever the process runs.
    """
    nodes, everywhere = {0: "0-1", 1: "2-3"}, "0-3"
    for device, cpus in enumerate((nodes[1], nodes[1], nodes[0], everywhere)):
        directory = tmp_path / f"bus/pci/devices/0000:a{device}:00.0"
        directory.mkdir(parents=True)
        (directory / "local_cpulist").write_text(f"{cpus}\n")
    pinned, used = set(), []
    import cupy

    monkeypatch.setattr(cupy.cuda.Device, "use", lambda device: used.append(device.id))
    monkeypatch.setattr(cuda_runtime, "cpus_near", lambda bus_id: cpus_near(bus_id, tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.add(frozenset(cpus)))
    for device, cpus in enumerate(({2, 3}, {2, 3}, {0, 1}, None)):
        pinned.clear()
        runtime = CudaRuntime(device, compute_handle=COMPUTE)
        buffer = runtime.allocate_host(4096, shared=shared)
        assert gpu.registered == {buffer.address: 4096}, "page-locked"
        runtime.free_host(buffer)
        assert gpu.registered == {}
        assert pinned == ({frozenset(cpus)} if cpus else set()), "its pages come from there"
    assert [*dict.fromkeys(used)] == [0, 1, 2, 3]
