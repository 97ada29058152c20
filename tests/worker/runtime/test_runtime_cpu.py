"""What is special about CPU streams: threads of their own, and the calling thread as the compute stream."""

from __future__ import annotations

import threading

import pytest

from fastdeploy_kvcache_v1.errors import LayerSwapTimeoutError
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.worker_fakes import LIMIT_S


@pytest.fixture
def runtime():
    return CpuRuntime()


def test_the_inline_compute_stream_is_the_caller(runtime):
    compute, stream, opened, seen = runtime.compute_stream, runtime.new_stream("a"), threading.Event(), []
    compute.submit(seen.append, threading.get_ident())
    assert compute.record_event().done()
    assert seen == [threading.get_ident()]
    stream.submit(opened.wait, LIMIT_S)
    event = stream.record_event()
    with pytest.raises(LayerSwapTimeoutError, match=r"stream compute waited more than 0\.001 s for a copy"):
        compute.wait_event(event, timeout=0.001)
    opened.set()
    compute.wait_event(event)
    assert event.done()
    stream.close()


def test_no_thread_exists_before_the_first_work(runtime):
    def is_running() -> bool:
        return "lazy" in {thread.name for thread in threading.enumerate()}

    stream = runtime.new_stream("lazy")
    assert not is_running()
    stream.submit(lambda: None)
    assert is_running()
    stream.close()
    assert not is_running()
