"""CPU streams: FIFO, real independence, units of failure, and what an event covers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.forked import ended_well, start
from tests.worker.worker_fakes import LIMIT_S, Gates

pytestmark = pytest.mark.usefixtures("cpu_ops")


@pytest.fixture
def gates():
    return Gates()


@pytest.fixture
def runtime(gates):
    runtime = CpuRuntime(delay=gates)
    yield runtime
    runtime.close()


def boom() -> None:
    raise ValueError("boom")


def test_a_stream_is_first_in_first_out(runtime):
    stream, seen = runtime.new_stream("a"), []
    for number in range(200):
        stream.submit(seen.append, number)
    stream.synchronize()
    assert seen == list(range(200))


def test_the_submitter_is_never_blocked_and_work_runs_elsewhere(runtime, gates):
    open_gate = gates.close("a")
    stream, threads = runtime.new_stream("a"), []
    stream.submit(lambda: threads.append(threading.current_thread()))
    event = stream.record_event()
    assert not event.done()
    assert event.error is None
    open_gate()
    event.wait(LIMIT_S)
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon


def test_one_stream_does_not_hold_up_another(runtime, gates):
    open_gate = gates.close("a")
    a, b = runtime.new_stream("a"), runtime.new_stream("b")
    a.submit(lambda: None)
    held = a.record_event()
    b.submit(lambda: None)
    b.record_event().wait(LIMIT_S)
    assert not held.done()
    open_gate()
    held.wait(LIMIT_S)


def test_wait_event_orders_streams(runtime, gates):
    open_gate = gates.close("a")
    a, b, seen = runtime.new_stream("a"), runtime.new_stream("b"), []
    a.submit(seen.append, "a")
    b.wait_event(a.record_event())
    b.submit(seen.append, "b")
    last = b.record_event()
    assert not last.done()
    open_gate()
    last.wait(LIMIT_S)
    assert seen == ["a", "b"]


def test_a_failure_concerns_the_rest_of_its_unit_only(runtime):
    stream, seen = runtime.new_stream("a"), []
    stream.begin()
    stream.submit(seen.append, 1)
    before = stream.record_event()
    stream.submit(boom)
    stream.submit(seen.append, 2)
    after = stream.record_event()
    stream.begin()
    stream.submit(seen.append, 3)
    fresh = stream.record_event()
    fresh.wait(LIMIT_S)
    before.wait(LIMIT_S)
    with pytest.raises(TransferError, match="ValueError: boom"):
        after.wait(LIMIT_S)
    assert isinstance(after.error, ValueError)
    assert seen == [1, 3]


def test_only_a_wait_that_needs_data_hands_a_failure_on(runtime):
    a, b, seen = runtime.new_stream("a"), runtime.new_stream("b"), []
    a.submit(boom)
    failed = a.record_event()
    b.begin()
    b.wait_event(failed)
    b.submit(seen.append, "ordered")
    ordered = b.record_event()
    b.begin()
    b.wait_event(failed, needs_data=True)
    b.submit(seen.append, "reads")
    reads = b.record_event()
    ordered.wait(LIMIT_S)
    with pytest.raises(TransferError, match="the copy it depends on failed"):
        reads.wait(LIMIT_S)
    assert seen == ["ordered"]


def test_a_failed_unit_still_waits(runtime, gates):
    """Its event stands for everything before it, so it must not be early."""
    open_gate = gates.close("a")
    a, b = runtime.new_stream("a"), runtime.new_stream("b")
    a.submit(lambda: None)
    slow = a.record_event()
    b.submit(boom)
    first = b.record_event()
    b.wait_event(slow)
    last = b.record_event()
    assert first.wait_done(LIMIT_S)
    assert not last.done()
    open_gate()
    assert last.wait_done(LIMIT_S)
    assert isinstance(last.error, ValueError)


def test_waiting_too_long_is_a_timeout(runtime, gates):
    open_gate = gates.close("a")
    stream = runtime.new_stream("a")
    stream.submit(lambda: None)
    event = stream.record_event()
    with pytest.raises(LayerSwapTimeoutError):
        event.wait(0.001)
    with pytest.raises(LayerSwapTimeoutError, match="stream compute"):
        runtime.compute_stream.wait_event(event, timeout=0.001)
    open_gate()
    event.wait(LIMIT_S)


def test_the_inline_compute_stream_is_the_caller(runtime):
    seen: list[int] = []
    compute = runtime.compute_stream
    compute.submit(seen.append, threading.get_ident())
    assert compute.record_event().done()
    assert seen == [threading.get_ident()]
    with pytest.raises(ValueError, match="boom"):
        compute.submit(boom)
    stream = runtime.new_stream("a")
    stream.submit(boom)
    failed = stream.record_event()
    compute.wait_event(failed)
    with pytest.raises(TransferError, match="boom"):
        compute.wait_event(failed, needs_data=True)


def test_closing_finishes_what_was_submitted(gates):
    runtime = CpuRuntime(delay=gates)
    a, b, seen = runtime.new_stream("a"), runtime.new_stream("b"), []
    for number in range(50):
        a.submit(seen.append, number)
    b.wait_event(a.record_event())
    b.submit(seen.append, "b")
    runtime.close()
    assert seen == [*range(50), "b"]
    with pytest.raises(CacheStateError, match="closed"):
        a.submit(boom)
    a.close()
    a.synchronize()
    runtime.close()


def test_no_thread_exists_before_the_first_work(runtime):
    def is_running() -> bool:
        of_python = {thread.name for thread in threading.enumerate()}
        of_the_system = {task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
        return "lazy" in of_python | of_the_system

    stream = runtime.new_stream("lazy")
    assert not is_running()
    stream.submit(lambda: None)
    assert is_running()
    stream.close()
    # A join returns as soon as the thread has given up its memory; the kernel's entry of it goes a moment later.
    while is_running():
        time.sleep(0.001)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_a_working_stream(runtime):
    stream = runtime.new_stream("a")
    stream.submit(lambda: None)
    stream.synchronize()

    def use():
        seen: list[int] = []
        stream.submit(seen.append, 1)
        assert stream.record_event().wait_done(LIMIT_S)
        assert seen == [1]

    assert ended_well(start(use))


def test_stream_time_between_events(runtime):
    stream = runtime.new_stream("a")
    first = stream.record_event(timed=True)
    stream.submit(lambda: None)
    second = stream.record_event(timed=True)
    second.wait(LIMIT_S)
    assert second.seconds_since(first) >= 0.0
    assert second.seconds_since(second) == 0.0


@pytest.mark.parametrize(("device", "host", "name"), [(1 << 60, 0, "device cache"), (0, 1 << 60, "swap space")])
def test_memory_that_is_not_there_is_one_clear_line(runtime, device, host, name):
    with pytest.raises(ConfigError, match=name) as caught:
        runtime.require_memory(device_bytes=device, host_bytes=host)
    assert "GiB" in str(caught.value)
    assert "\n" not in str(caught.value)
    runtime.require_memory(device_bytes=1 << 10, host_bytes=1 << 10)
