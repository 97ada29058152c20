"""The launcher over the fake driver: which way a copy goes, what is uploaded when, and what holds the interpreter lock.

Nothing in this file shows that CUDA does what its documentation says.
"""

from __future__ import annotations

from _ctypes import FUNCFLAG_PYTHONAPI
from contextlib import closing
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, TransferError
from fastdeploy_kvcache_v1.worker.cuda import copies as cuda_copies
from fastdeploy_kvcache_v1.worker.cuda import driver
from fastdeploy_kvcache_v1.worker.cuda import runtime as cuda_runtime
from fastdeploy_kvcache_v1.worker.cuda.rates import Rates, Timing
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime
from fastdeploy_kvcache_v1.worker.ops import plan_spans
from tests.gpu.stand_in.fake_driver import COMPUTE
from tests.worker.ops.copies import Memory, on_device, only

EVERY_WAY = Rates(
    {
        "kernel": [[Timing(16, 20, 20)]] * 2,
        "batch": [[Timing(16, 30, 10)]] * 2,
        "spans": [[Timing(16, 90, 5)]] * 2,
    },
    reach=1 << 40,
)


class Copying:
    """Copies of a small cache on the fake GPU; host memory is page-locked unless it is said."""

    def __init__(self, gpu, rates, *, locked=True, **sizes):
        self.gpu, self.memory = gpu, Memory(np.random.default_rng(2), **sizes)
        self.expected = self.memory.bytes.copy()
        self.tiers = self.memory.tiers_in(self.expected)
        if locked:
            gpu.call("cuMemHostRegister", self.memory.bytes.ctypes.data, self.memory.bytes.nbytes, 3)
        self.runtime = CudaRuntime(compute_handle=COMPUTE, rates=rates)
        rows = on_device(gpu, self.memory.device_rows, self.memory.bytes)
        self.copies = self.runtime.new_copies(rows, self.memory.host_rows)
        self.streams = {to_device: self.runtime.new_stream(str(to_device)) for to_device in (True, False)}

    def submit(self, of, to, *, to_device, layers=None):
        """All layers at once, or those named, one by one."""
        stream, num = self.streams[to_device], len(self.memory.tiers.host)
        spans = plan_spans(of, to, num_sources=num, num_targets=num)
        stream.begin()
        if layers is None:
            stream.submit(partial(self.copies.all_layers, stream, spans, to_device=to_device))
        for layer in layers or ():
            stream.submit(partial(self.copies.layer, stream, layer, spans, to_device=to_device))
        for layer in range(len(self.tiers.device)) if layers is None else layers:
            for device, host in zip(self.tiers.device[layer], self.tiers.host_roles[layer], strict=True):
                (target, source) = (device, host) if to_device else (host, device)
                target[to] = source[of]
        return stream.record_event()

    def entries(self, *names):
        return [entry[0] for entry in self.gpu.log if entry[0] in names]

    def require_right(self):
        self.gpu.run_all()
        assert self.gpu.faults == []
        assert np.flatnonzero(self.memory.bytes != self.expected).tolist() == []

    def close(self):
        for stream in self.streams.values():
            stream.close()
        self.copies.close()


@pytest.mark.parametrize(
    ("slots", "way"),
    [([0, 2, 4, 6, 8], "kernel"), ([0, 1, 2, 4, 5], "batch"), ([*range(16)], "copy 2D")],
)
def test_the_fastest_way_is_looked_up_by_the_runs(gpu, slots, way):
    with closing(Copying(gpu, EVERY_WAY, layers=2, widths=(16,), device_slots=20, host_slots=20)) as one:
        one.submit(slots, slots, to_device=True, layers=[0, 1])
        assert {*one.entries("kernel", "batch", "copy 2D")} == {way}
        one.require_right()


def test_a_plan_is_uploaded_once_for_all_its_layers(gpu):
    with closing(Copying(gpu, only("kernel"), layers=5)) as one:
        gpu.log.clear()
        one.submit([0, 3], [5, 1], to_device=True, layers=range(5))
        assert one.entries("copy", "kernel") == ["copy", *["kernel"] * 5]
        one.submit([1, 4], [0, 3], to_device=True, layers=[2])
        one.submit([2, 4], [2, 5], to_device=False)
        assert one.entries("copy", "kernel")[6:] == ["copy", "kernel"] * 2
        one.require_right()


@pytest.mark.parametrize(
    ("to_device", "layers", "shape"),
    [(False, None, (1, 1024)), (False, [0], (2, 512)), (True, [0], (7, 320)), (True, None, (7, 320))],
)
def test_only_swap_outs_at_once_keep_to_a_multiprocessor(gpu, to_device, layers, shape):
    with closing(Copying(gpu, only("kernel"), layers=2)) as one:
        one.submit([0, 3], [5, 1], to_device=to_device, layers=layers)
        assert [entry[-1] for entry in gpu.log if entry[0] == "kernel"] == [shape]
        one.require_right()


@pytest.mark.parametrize("way", ["kernel", "batch", "spans"])
def test_steps_without_waits_do_not_share_plans_or_staging(gpu, way):
    """Both directions, step behind step: each has its plan, and what an upload reads is there until it has read it."""
    gpu.progress_on_query = False
    rng = np.random.default_rng(5)
    with closing(Copying(gpu, only(way), layers=3, widths=(32, 12), device_slots=64, host_slots=64)) as one:
        for turn in range(8):
            mine = [int(slot) for slot in rng.permutation(8) + 8 * turn]
            one.submit(mine[:3], mine[1:4], to_device=False)
            one.submit(mine[5:], mine[4:7], to_device=True, layers=[2, 0, 1])
        one.require_right()
        for stream in one.streams.values():
            assert stream.record_event().error is None


def test_the_memory_of_an_upload_goes_when_it_was_read(gpu):
    with closing(Copying(gpu, only("kernel"))) as one:
        before = len(gpu.registered)
        for _ in range(20):
            one.submit([0], [1], to_device=False).wait()
        assert len(gpu.registered) <= before + 2
    assert len(gpu.registered) == before


def held(gpu):
    """Allocations and modules."""
    return sum(memory.file >= 0 for memory in gpu._memory.values()), len(gpu.modules)


def test_gpu_memory_of_a_copier_is_freed(gpu):
    with closing(Copying(gpu, only("kernel"))):
        assert held(gpu) == (3, 1), "rows, and a plan for each direction"
    assert held(gpu) == (0, 0)


def test_rows_that_were_not_uploaded_yet_are_waited_for(gpu):
    """The call may return while they are on their way, and copy streams wait for nobody."""
    gpu.progress_on_query = False
    with closing(Copying(gpu, only("kernel"))) as one:
        assert not gpu._streams[0].queue
        one.submit([0], [1], to_device=True, layers=[0])
        one.require_right()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"cuModuleLoadData": 209}, "the driver refused it: cuModuleLoadData: CUDA error 209"),
        ({"cuModuleGetFunction": 500}, "the driver refused it: cuModuleGetFunction: CUDA error 500"),
        ({"cuMemAlloc": 2}, "the driver refused it: cudaError2: cuMemAlloc"),
        ({"cuMemcpyAsync": 700}, "the driver refused it: cudaError700: cuMemcpyAsync"),
        ({"cuMemHostGetDevicePointer": 1}, "the driver refused it: cuMemHostGetDevicePointer"),
    ],
)
def test_without_a_kernel_the_next_way_copies(gpu, spoil, reason, caplog):
    gpu.statuses |= spoil
    with closing(Copying(gpu, EVERY_WAY, device_slots=20, host_slots=20)) as one:
        gpu.statuses.clear()
        assert held(gpu) == (0, 0), "what was made before is given back"
        assert one.copies.left["kernel"].startswith(reason)
        assert f"do not use kernel: {reason}" in caplog.text
        one.submit([0, 2, 4, 6], [0, 3, 5, 7], to_device=True, layers=[0, 1])
        assert {*one.entries("kernel", "batch", "copy 2D")} == {"batch"}
        one.require_right()


def test_tier_beyond_the_tried_size_uses_plain_copies(gpu):
    for reach, ways in ((20 * 40, {"copy 2D"}), (1 << 20, {"kernel"})):
        gpu.log.clear()
        rates = Rates(EVERY_WAY.timings, reach=reach)
        with closing(Copying(gpu, rates, layers=1, widths=(48,), device_slots=20, host_slots=20)) as one:
            one.submit([0, 2], [0, 3], to_device=True, layers=[0])
            assert {*one.entries("kernel", "batch", "copy 2D")} == ways
            one.require_right()


def test_plain_copies_that_failed_their_trial_are_never_used(gpu):
    rates = Rates({"kernel": EVERY_WAY.timings["kernel"]}, {"spans": "its trial ended with status 1"}, reach=20)
    with pytest.raises(
        ConfigError, match=r"^no copy path is left .*spans: its trial ended .*kernel: tiers of \d+ bytes were"
    ):
        Copying(gpu, rates)
    with closing(Copying(gpu, Rates(rates.timings, rates.left, reach=1 << 40))) as one:
        one.submit([0, 2], [0, 3], to_device=True, layers=[0])
        one.require_right()


def test_a_call_that_the_driver_refuses_fails_its_unit_and_no_other(gpu):
    with closing(Copying(gpu, only("kernel"))) as one:
        gpu.statuses["cuLaunchKernelEx"] = 1
        expected = one.expected.copy()
        failed = one.submit([0], [1], to_device=True, layers=[0])
        gpu.statuses.clear()
        one.expected[:] = expected
        one.submit([2], [3], to_device=True, layers=[0])
        with pytest.raises(TransferError, match="cuLaunchKernelEx: CUDA error 1"):
            failed.wait()
        one.require_right()


class Told(dict):
    """Functions of the driver, which say of which kind they are when they are called."""

    def __init__(self, functions, kept, kind):
        self._functions, self._kept, self._kind = functions, kept, kind

    def __getitem__(self, name):
        return lambda *given: self._kept.append(self._kind) or self._functions[name](*given)


def test_a_stream_with_many_open_calls_gives_the_interpreter_lock_away(gpu, monkeypatch):
    """And keeps it again when they have run."""
    gpu.progress_on_query = False
    runtime, kept, made = CudaRuntime(compute_handle=COMPUTE), [], driver.driver()
    kinds = [type(functions["cuEventRecord"])._flags_ for functions in (made.keeping_lock, made.giving_lock)]
    assert [bool(flags & FUNCFLAG_PYTHONAPI) for flags in kinds] == [True, False]
    made.keeping_lock, made.giving_lock = Told(made.keeping_lock, kept, True), Told(made.giving_lock, kept, False)
    stream = runtime.new_stream("in")
    asked = Mock(wraps=runtime._cupy.cuda.runtime.eventQuery)
    monkeypatch.setattr(runtime._cupy.cuda.runtime, "eventQuery", asked)
    for _ in range(cuda_runtime.MOST_OPEN + 10):
        stream.record_event()
    assert asked.call_count == 1, "it costs as much as a call"
    assert kept == [True] * cuda_runtime.MOST_OPEN + [False] * 10
    gpu.run_all()
    for _ in range(cuda_runtime.LOOK_EVERY):
        stream.record_event()
    assert kept[-1]
    runtime.compute_stream.record_event()
    assert not kept[-1], "how much Paddle has queued there is not known"


def test_a_batch_counts_by_its_copies_for_the_interpreter_lock(gpu):
    gpu.progress_on_query = False
    runtime, kept, made = CudaRuntime(compute_handle=COMPUTE), [], driver.driver()
    stream, memory = runtime.new_stream("in"), np.zeros(2 * cuda_runtime.MOST_OPEN, np.uint8)
    made.keeping_lock, made.giving_lock = Told(made.keeping_lock, kept, True), Told(made.giving_lock, kept, False)
    places = np.arange(cuda_runtime.MOST_OPEN, dtype=np.uint64) + np.uint64(memory.ctypes.data)
    for copies in (cuda_runtime.MOST_OPEN - 20, 10, 30, 1):
        sizes = np.ones(copies, np.uint64)
        cuda_copies.copy_batch(stream, places[:copies] + np.uint64(cuda_runtime.MOST_OPEN), places[:copies], sizes)
    assert kept == [True, True, False, False]
    stream.record_event()
    gpu.run_all()
    for _ in range(cuda_runtime.LOOK_EVERY):
        stream.record_event()
    assert kept[-1]


def test_predicted_copy_times_lie_between_the_measured_ones():
    timing = Timing(1024, apart=160.0, joined=10.0)
    assert timing.of_copy(16, 16) == pytest.approx(16 * 160)
    assert timing.of_copy(16, 1) == pytest.approx(16 * 10)
    assert timing.of_copy(16, 1) < timing.of_copy(16, 4) < timing.of_copy(16, 16)
    assert Timing(1024, apart=5.0, joined=9.0).of_copy(16, 16) >= 0
