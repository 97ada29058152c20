"""What is special about CPU streams: threads of their own, and the calling thread as the compute stream."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, LayerSwapTimeoutError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.forked import ended_well, start
from tests.worker.worker_fakes import LIMIT_S

pytestmark = pytest.mark.usefixtures("cpu_ops")


@pytest.fixture
def runtime():
    runtime = CpuRuntime()
    yield runtime
    runtime.close()


def test_the_inline_compute_stream_is_the_caller(runtime):
    compute, stream, opened, seen = runtime.compute_stream, runtime.new_stream("a"), threading.Event(), []
    compute.submit(seen.append, threading.get_ident())
    compute.enqueue(seen.append, 7)
    assert compute.record_event().done()
    assert seen == [threading.get_ident(), 7]
    stream.submit(opened.wait, LIMIT_S)
    event = stream.record_event()
    with pytest.raises(LayerSwapTimeoutError, match=r"stream compute waited more than 0\.001 s for a copy"):
        compute.wait_event(event, timeout=0.001)
    opened.set()
    compute.wait_event(event)
    assert event.done()


def test_an_event_of_another_kind_of_stream_is_waited_for_too(runtime):
    """Whatever the runtime's own streams are, a peer's use of a slot is a plain event."""
    other, seen = CpuRuntime(compiled=False), []
    gate, opened = other.new_stream("gate"), threading.Event()
    gate.submit(opened.wait, LIMIT_S)
    gate.submit(lambda: 1 / 0)
    held = gate.record_event()
    stream = runtime.new_stream("a")
    stream.wait_event(held)
    stream.submit(seen.append, 1)
    ordered = stream.record_event()
    stream.begin()
    stream.wait_event(held, needs_data=True)
    stream.submit(seen.append, 2)
    reads = stream.record_event()
    stream.begin()
    stream.submit(lambda: 1 / 0)
    stream.wait_event(held)
    failed = stream.record_event()
    assert not ordered.wait_done(0.001)
    assert not failed.done()
    opened.set()
    ordered.wait(LIMIT_S)
    assert reads.wait_done(LIMIT_S)
    assert str(reads.error) == "the copy it depends on failed: ZeroDivisionError: division by zero"
    assert seen == [1]
    other.close()


def test_the_core_is_asked_for_or_else_used_where_it_is(cpu_ops):
    for compiled, has_core in ((None, cpu_ops == "compiled"), (False, False)):
        runtime = CpuRuntime(compiled=compiled)
        stream = runtime.new_stream("a")
        stream.begin()
        assert (stream.handle != 0) == has_core
        runtime.close()
    if ops.COMPILED is None:
        with pytest.raises(ConfigError, match="the compiled copy ops are not there"):
            CpuRuntime(compiled=True)


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
