"""The CuPy runtime against a fake CuPy, because there is no GPU here: what is called, on which stream, in what order.

Nothing in this file shows that CUDA does what its documentation says.
"""

from __future__ import annotations

import os
import sys

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.ops import host_alloc, host_free
from fastdeploy_kvcache_v1.worker.runtime import CudaRuntime, cuda, placement
from fastdeploy_kvcache_v1.worker.runtime.cpu import CpuEvent
from fastdeploy_kvcache_v1.worker.runtime.cuda import CudaStream
from fastdeploy_kvcache_v1.worker.runtime.placement import node_of_pci_device
from tests.worker.data_path import DEVICE_SLOTS, HOST_SLOTS, DataPath
from tests.worker.fake_cupy import COMPUTE, FakeGpu, FakeGpuBackend, make_cupy
from tests.worker.worker_fakes import NumpyBackend, Rig, evict, swap_in

H2D, D2H = 1, 2


@pytest.fixture
def gpu(monkeypatch, cupy_ops):
    gpu = FakeGpu()
    for name, module in make_cupy(gpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    return gpu


@pytest.fixture
def rig(gpu):
    return Rig(CudaRuntime(device=0, compute_handle=COMPUTE), backend=FakeGpuBackend(num_layers=2))


def test_calls_of_one_step(gpu, rig):
    """Evict slot 0 to host 2, swap host 2 into device 1: the input stream waits on the device for the output stream."""
    gpu.progress_on_query = False
    gpu.log.clear()
    counter = rig.submit(evict((0,), (2,)), swap_in((2,), (1,)))
    rig.controller.before_compute([1], [], counter=counter)
    for layer in range(2):
        counter.wait_for_layer(layer)
    rig.controller.after_compute([1], [])

    output, into = [entry[1] for entry in gpu.log if entry[0] == "stream"]
    out_end = [entry for entry in gpu.log if entry[:2] == ("record", output)][-1][2]
    layers = [entry[2] for entry in gpu.log if entry[:2] == ("record", into) and entry[3] == "untimed"]
    shape = [(entry[0], entry[-1] if entry[0].startswith("memcpy") else entry[1]) for entry in gpu.log]
    assert shape == [
        ("stream", output),
        ("record", output),
        *[("memcpyAsync", output)] * 4,
        ("record", output),
        ("stream", into),
        ("wait", into),
        ("record", into),
        *[("memcpyAsync", into)] * 2,
        ("record", into),
        *[("memcpyAsync", into)] * 2,
        ("record", into),
        ("record", into),
        ("wait", COMPUTE),
        ("wait", COMPUTE),
        ("record", COMPUTE),
    ]
    assert [entry[2] for entry in gpu.log if entry[:2] == ("wait", into)] == [out_end]
    assert [entry[2] for entry in gpu.log if entry[:2] == ("wait", COMPUTE)] == layers
    assert {entry[2] for entry in gpu.log if entry[0] == "stream"} == {"non-blocking"}
    assert rig.controller.take_results() == [], "nothing has run yet, and nobody was blocked"

    gpu.run_all()
    first, second = rig.controller.take_results()
    assert (first.target, first.ok, first.seconds) == (CacheLevel.HOST, True, 0.002)
    assert (second.target, second.ok, second.seconds) == (CacheLevel.DEVICE, True, 0.002)
    rig.close()


def test_neighbours_are_one_copy(gpu, rig):
    """Rows of a device tensor are dense, those of one layer in the block-major host pool are a block apart."""
    rig.submit(evict((2, 3, 4, 0), (1, 2, 3, 5)))
    block, host = rig.layout.block_bytes, rig.controller.host_pool.block(0).ctypes.data
    copies = [entry for entry in gpu.log if entry[0].startswith("memcpy")]
    expected, offset = [], 0
    for array, width in zip(rig.arrays, [16, 24, 16, 24], strict=True):
        stream, base = copies[0][-1], array.ctypes.data
        expected.append(("memcpyAsync", host + 5 * block + offset, base, width, D2H, stream))
        to, of = host + block + offset, base + 2 * width
        expected.append(("memcpy2DAsync", to, block, of, width, width, 3, D2H, stream))
        offset += width
    assert copies == expected
    assert copies[0][-1] != 0, "never the legacy NULL stream"
    gpu.run_all()
    rig.submit(into=swap_in((1, 2), (0, 1)))
    assert {entry[-2] for entry in gpu.log if entry[0].startswith("memcpy")} == {D2H, H2D}
    rig.close()


def random_path(gpu: FakeGpu, seed: int, *, unknown_slots: bool) -> DataPath:
    gpu.random.seed(seed)
    runtime = CudaRuntime(compute_handle=COMPUTE)
    rig = Rig(runtime, device=DEVICE_SLOTS, host=HOST_SLOTS, backend=FakeGpuBackend())

    def launch(fn, *args):
        runtime.compute_stream.submit(gpu.launch, COMPUTE, fn, *args)

    return DataPath(seed, rig, launch, unknown_slots=unknown_slots)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_steps_read_right_whatever_stream_runs_first(gpu, seed):
    path = random_path(gpu, seed, unknown_slots=True)
    results = [result for number in range(1, 1201) for result in path.step_and_look(number)]
    path.settle()
    assert path.faults == []
    assert len(results) > 800
    assert all(result.ok for result in results)
    path.rig.close()


def test_a_runtime_that_forgets_stream_waits_is_detected(gpu, monkeypatch):
    monkeypatch.setattr(CudaStream, "wait_event", lambda self, event, *, needs_data=False, timeout=None: None)
    path = random_path(gpu, 1, unknown_slots=False)
    for _ in range(100):
        path.step()
    path.settle()
    assert path.faults


def test_a_copy_that_cannot_be_submitted_fails_its_transfer_only(gpu, rig):
    rig.submit(evict((0,), (0,)), swap_in((5,), (5,))).wait_all()
    gpu.run_all()
    rig.controller.take_results()
    gpu.fail_copies_from = next(entry[-1] for entry in gpu.log if entry[0] == "memcpyAsync")
    bad = rig.submit(evict((1,), (1,)), swap_in((1,), (4,)))
    good = rig.submit(into=swap_in((0,), (3,)))
    with pytest.raises(TransferError, match="invalid argument"):
        bad.wait_for_layer(0)
    good.wait_all()
    with pytest.raises(TransferError):
        rig.controller.before_compute([4], [])
    gpu.run_all()
    assert [(r.step, r.target, r.target_slots) for r in rig.controller.take_results()] == [
        (2, CacheLevel.HOST, (1,)),
        (2, CacheLevel.DEVICE, (4,)),
        (3, CacheLevel.DEVICE, ()),
    ]
    rig.close()


def test_an_error_the_gpu_reports_later_fails_the_transfer(gpu, rig):
    gpu.progress_on_query = False
    rig.submit(evict((0,), (0,)))
    gpu.event_status = 700
    (result,) = rig.controller.take_results()
    assert "CUDA error 700" in str(result.error)
    assert result.target_slots == (0,)


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


def test_what_uses_a_slot_of_a_peer_is_submitted_when_the_peer_is_done(gpu, rig):
    rig.controller.device_hazards.after(Actor.REMOTE, Lease(gpu), reads=(3,))
    gpu.log.clear()
    rig.submit(into=swap_in((0,), (3,)))
    names = [entry[0] for entry in gpu.log]
    assert names.index("the lease ends") < names.index("memcpyAsync")

    rig.controller.device_hazards.after(Actor.REMOTE, Lease(gpu), reads=(4,))
    gpu.log.clear()
    rig.controller.before_compute([], [4])
    assert gpu.log == [("the lease ends",)]
    rig.close()


def test_a_peer_that_does_not_end_its_use_is_not_waited_for_for_ever(gpu):
    rig = Rig(CudaRuntime(compute_handle=COMPUTE), backend=FakeGpuBackend(num_layers=2), timeout_s=0.01)
    rig.controller.device_hazards.after(Actor.REMOTE, Lease(gpu, ends=False), reads=(3,))
    with pytest.raises(LayerSwapTimeoutError, match=r"a peer's use of a slot did not end within 0\.01 s"):
        rig.submit(into=swap_in((0,), (3,)))
    assert not [entry for entry in gpu.log if entry[0] == "memcpyAsync"]
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.before_compute([], [3])
    assert rig.controller.take_results() == []


def test_what_a_peer_did_not_bring_is_not_read(gpu, rig):
    lost = Lease(gpu, error=OSError("the link is gone"))
    rig.controller.device_hazards.after(Actor.REMOTE, lost, writes=(3,))
    with pytest.raises(TransferError, match="the link is gone"):
        rig.controller.before_compute([3], [])
    rig.submit(evict((3,), (0,)))
    gpu.run_all()
    (result,) = rig.controller.take_results()
    assert "the link is gone" in str(result.error)
    rig.close()


def test_a_host_wait_can_time_out(gpu, rig):
    gpu.progress_on_query = False
    rig.submit(evict((0,), (0,)))
    with pytest.raises(LayerSwapTimeoutError):
        rig.controller.drain(0.001)
    gpu.run_all()
    rig.controller.drain(0.001)
    rig.close()


def test_a_runtime_that_is_closed_has_closed_its_streams(gpu):
    runtime = CudaRuntime(compute_handle=COMPUTE)
    stream, done = runtime.new_stream("a"), []
    stream.submit(gpu.launch, stream.handle, done.append, 1)
    runtime.close()
    assert (stream.closed, done) == (True, [1])
    with pytest.raises(CacheStateError, match="stream a is closed"):
        stream.submit(done.append, 2)


def test_a_stream_of_a_thread_is_on_its_device_and_waits_for_no_other_one(gpu):
    stream = cuda.stream_on(3, "peer")
    assert gpu.log == [("device", 3), ("stream", stream.handle, "non-blocking")]


def test_host_memory_is_page_locked_as_long_as_it_is_used(gpu, rig, monkeypatch):
    assert list(gpu.registered.values()) == [rig.controller.host_pool.nbytes]
    rig.close()
    freed = []
    monkeypatch.setattr(cuda.ops, "host_free", lambda buffer: freed.append(buffer) or host_free(buffer))
    assert gpu.registered == {}
    gpu.free_bytes = 100
    runtime = CudaRuntime(compute_handle=COMPUTE)
    with pytest.raises(ConfigError, match="cannot be page-locked: CUDARuntimeError: cudaErrorMemoryAllocation"):
        runtime.allocate_host(4096)
    assert len(freed) == 1
    with pytest.raises(ConfigError, match="the device cache needs"):
        runtime.require_memory(device_bytes=101, host_bytes=0)
    with pytest.raises(ConfigError, match="swap space"):
        runtime.require_memory(device_bytes=0, host_bytes=1 << 60)


@pytest.mark.parametrize(("node_of_gpu", "chosen"), [(1, 1), (None, 0)])
def test_host_memory_is_near_the_gpu_or_else_near_the_process(gpu, monkeypatch, node_of_gpu, chosen):
    asked, found = [], []
    monkeypatch.setattr(cuda, "node_of_pci_device", lambda bus_id: asked.append(bus_id) or node_of_gpu)
    monkeypatch.setattr(
        cuda, "allocate_near", lambda nbytes, choose, **_: found.append(choose(nodes)) or host_alloc(nbytes)
    )
    nodes = {0: os.sched_getaffinity(0), 1: {10_000}}
    runtime = CudaRuntime(3, compute_handle=COMPUTE)
    runtime.free_host(runtime.allocate_host(4096))
    assert (asked, found) == (["0000:A3:00.0"], [chosen])


def test_tensors_of_the_wrong_device_are_refused(gpu):
    with pytest.raises(ConfigError, match="not on the device of the runtime"):
        Rig(CudaRuntime(compute_handle=COMPUTE), backend=NumpyBackend())


@pytest.mark.parametrize("shared", [False, True])
def test_each_ranks_host_memory_is_on_the_node_of_its_own_device(gpu, monkeypatch, tmp_path, shared):
    """Four ranks on a machine whose devices 0 and 1 are near node 1 and the others near node 0."""
    for device, node in enumerate((1, 1, 0, 0)):
        directory = tmp_path / f"bus/pci/devices/0000:a{device}:00.0"
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{node}\n")
    nodes = {0: frozenset(os.sched_getaffinity(0)), 1: frozenset({10_000})}
    pinned, bound = set(), []
    monkeypatch.setattr(cuda, "node_of_pci_device", lambda bus_id: node_of_pci_device(bus_id, tmp_path))
    monkeypatch.setattr(placement, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(placement, "pages_by_node", lambda address: {})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.add(frozenset(cpus)))
    monkeypatch.setattr(ops, "host_alloc", lambda nbytes, numa_node: bound.append(numa_node) or host_alloc(nbytes))
    for device, node in enumerate((1, 1, 0, 0)):
        pinned.clear()
        runtime = CudaRuntime(device, compute_handle=COMPUTE)
        runtime.free_host(runtime.allocate_host(4096, shared=shared))
        assert pinned == {nodes[node]}, "its pages come from there"
    assert bound == ([] if shared else [1, 1, 0, 0]), "what can be bound is"
