"""What every runtime promises: the streams and events of `runtime/base.py`, over threads and CUDA."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.gpu.stand_in.fake_driver import COMPUTE
from tests.worker.worker_fakes import LIMIT_S


class OnCpu:
    def __init__(self, runtime):
        self.runtime = runtime

    def work(self, stream, fn, *args):
        """`fn(*args)` happens in its turn on `stream`."""
        stream.submit(fn, *args)

    def hold(self, stream):
        """What comes next on `stream` waits until the result is called."""
        opened = threading.Event()
        stream.submit(opened.wait, LIMIT_S)
        return opened.set


class OnGpu(OnCpu):
    def __init__(self, gpu):
        super().__init__(CudaRuntime(compute_handle=COMPUTE))
        self.gpu = gpu

    def work(self, stream, fn, *args):
        stream.submit(self.gpu.launch, stream.handle, partial(fn, *args))

    def hold(self, stream):
        opened = []
        self.gpu.push(stream.handle, lambda: bool(opened))
        return lambda: opened.append(True)


@pytest.fixture(params=["threads", "cuda"])
def on(request):
    return OnGpu(request.getfixturevalue("gpu")) if request.param == "cuda" else OnCpu(CpuRuntime())


@pytest.fixture
def streams(on):
    made = on.runtime.new_stream("a"), on.runtime.new_stream("b")
    yield made
    for stream in made:
        stream.close()


def boom():
    raise ValueError("boom")


def test_the_submitter_is_not_blocked_and_no_stream_holds_up_another(on, streams):
    let_go, seen = on.hold(streams[0]), []
    on.work(streams[0], seen.append, "a")
    held = streams[0].record_event()
    assert (held.done(), held.error) == (False, None)
    on.work(streams[1], seen.append, "b")
    streams[1].record_event().wait(LIMIT_S)
    assert (held.done(), seen) == (False, ["b"])
    let_go()
    held.wait(LIMIT_S)
    assert seen == ["b", "a"]
    assert held.done()


def test_an_event_orders_streams(on, streams):
    let_go, seen = on.hold(streams[0]), []
    on.work(streams[0], seen.append, "a")
    streams[1].wait_event(streams[0].record_event())
    on.work(streams[1], seen.append, "b")
    last = streams[1].record_event()
    assert not last.done()
    let_go()
    last.wait(LIMIT_S)
    assert seen == ["a", "b"]


def test_a_failure_concerns_the_rest_of_its_unit_only(on, streams):
    stream, seen = streams[0], []
    stream.begin()
    stream.submit(seen.append, 1)
    before = stream.record_event()
    stream.submit(boom)
    stream.submit(seen.append, 2)
    after = stream.record_event()
    stream.begin()
    stream.submit(seen.append, 3)
    stream.record_event().wait(LIMIT_S)
    before.wait(LIMIT_S)
    with pytest.raises(TransferError, match="a copy failed: ValueError: boom"):
        after.wait(LIMIT_S)
    assert isinstance(after.error, ValueError)
    assert seen == [1, 3]


def test_only_a_wait_that_needs_data_hands_a_failure_on(on, streams):
    (a, b), seen = streams, []
    a.submit(boom)
    failed = a.record_event()
    b.begin()
    b.wait_event(failed)
    b.submit(seen.append, "ordered")
    b.record_event().wait(LIMIT_S)
    b.begin()
    b.wait_event(failed, needs_data=True)
    b.submit(seen.append, "reads")
    with pytest.raises(TransferError, match="an earlier copy failed: ValueError: boom"):
        b.record_event().wait(LIMIT_S)
    assert seen == ["ordered"]


def test_a_failed_unit_still_waits(on, streams):
    """Its event stands for everything before it, so it must not be early."""
    (a, b), let_go = streams, on.hold(streams[0])
    slow = a.record_event()
    b.submit(boom)
    b.wait_event(slow)
    last = b.record_event()
    assert not last.wait_done(0.001)
    let_go()
    assert last.wait_done(LIMIT_S)
    assert isinstance(last.error, ValueError)


def test_waiting_too_long_is_a_timeout(on, streams):
    let_go = on.hold(streams[0])
    event = streams[0].record_event()
    with pytest.raises(LayerSwapTimeoutError, match=r"a copy was not done within 0\.001 s"):
        event.wait(0.001)
    let_go()
    event.wait(LIMIT_S)


def test_compute_raises_the_known_error_of_a_copy_whose_data_it_needs(on, streams):
    compute = on.runtime.compute_stream
    compute.begin()
    with pytest.raises(ValueError, match="boom"):
        compute.submit(boom)
    streams[0].submit(boom)
    failed = streams[0].record_event()
    compute.wait_event(failed)
    with pytest.raises(TransferError, match="boom"):
        compute.wait_event(failed, needs_data=True)
    compute.record_event().wait(LIMIT_S)


def test_closing_a_stream_finishes_its_submitted_work(on, streams):
    (a, b), seen = streams, []
    for number in range(50):
        on.work(a, seen.append, number)
    b.wait_event(a.record_event())
    on.work(b, seen.append, "b")
    b.close()
    a.close()
    assert seen == [*range(50), "b"]
    with pytest.raises(CacheStateError, match="stream a is closed"):
        a.submit(boom)
    a.close()
    a.synchronize()
