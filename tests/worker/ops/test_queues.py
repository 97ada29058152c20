"""Queues of the compiled core through ctypes: the copy is on the very queue whose event is recorded."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, TransferError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import CopyRun, CopyRuns
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.worker.ops.faces import Memory, Shape, rows_of
from tests.worker.ops.native import require_core, run_python

LIMIT_NS = 20_000_000_000
RUNS = CopyRuns.of([CopyRun(0, 2, 2)])


@pytest.fixture
def compiled():
    return require_core()


@pytest.fixture
def memory():
    return Memory.random(Shape(2, (40, 8), 6, 6), np.random.default_rng(8))


class Gated:
    """A queue that stands still until `open()`."""

    def __init__(self, compiled) -> None:
        self.queue = Queue(compiled.library, "gated")
        self._gate = threading.Event()
        self.queue.call(self._gate.wait)

    def open(self) -> None:
        self._gate.set()

    def close(self) -> None:
        self.open()
        self.queue.close()


@pytest.fixture
def gated(compiled):
    gated = Gated(compiled)
    yield gated
    gated.close()


def test_the_copy_runs_where_its_event_is_recorded(compiled, gated, memory):
    """Held up together, let go together; an event of another queue says nothing about the copy."""
    other = Queue(compiled.library, "other")
    before = memory.host.copy()
    compiled.swap_cache_all_layers(memory.host_rows, memory.device_rows, RUNS, gated.queue.id)
    event = gated.queue.record()
    assert other.record().wait(LIMIT_NS)
    assert not event.wait(0)
    assert (memory.host == before).all(), "the copy did not wait for the work before it"
    gated.open()
    assert event.wait(LIMIT_NS)
    assert event.error is None
    assert (memory.host[2:4, :40] == memory.device[0][0][0:2]).all()
    other.close()


def test_waits_order_queues(compiled, gated, memory):
    """Out over one queue, back over another, which must not be early."""
    second = Queue(compiled.library, "second")
    memory.device[0][0][0:2] = 7
    compiled.swap_cache_all_layers(memory.host_rows, memory.device_rows, RUNS, gated.queue.id)
    second.wait(gated.queue.record(), needs_data=True)
    compiled.swap_cache_all_layers(memory.device_rows, memory.host_rows, CopyRuns.of([CopyRun(2, 4, 2)]), second.id)
    back = second.record()
    assert not back.wait(1_000_000)
    gated.open()
    assert back.wait(LIMIT_NS)
    assert (memory.device[0][0][4:6] == 7).all()
    second.close()


def test_descriptors_may_go_while_the_copy_waits(compiled, gated):
    """Plan, rows and slots are the core's own; only the memory has to stay."""
    source, target = np.full((50, 64), 3, np.uint8), np.zeros((50, 64), np.uint8)
    for first in range(0, 50, 10):
        runs = CopyRuns.of([CopyRun(first, first, 10)])
        compiled.swap_cache_per_layer((rows_of(target),), (rows_of(source),), runs, gated.queue.id)
        del runs
    gated.open()
    assert gated.queue.record().wait(LIMIT_NS)
    assert (target == 3).all()


def test_a_refused_copy_does_not_harm_the_queue(compiled, gated, memory):
    with pytest.raises(CacheStateError, match="reads row 6 of 6"):
        compiled.swap_cache_all_layers(
            memory.host_rows, memory.device_rows, CopyRuns.of([CopyRun(5, 0, 2)]), gated.queue.id
        )
    gated.open()
    event = gated.queue.record()
    assert event.wait(LIMIT_NS)
    assert event.error is None


def test_a_handle_that_is_no_queue_is_refused(compiled, memory):
    queue = Queue(compiled.library, "closed")
    queue.close()
    for handle in (queue.id, 1 << 40):
        with pytest.raises(CacheStateError, match=f"there is no queue {handle}"):
            compiled.swap_cache_all_layers(memory.host_rows, memory.device_rows, RUNS, handle)


def test_a_failing_call_fails_its_unit_and_those_who_need_its_data(compiled):
    first, second, seen = Queue(compiled.library, "first"), Queue(compiled.library, "second"), []

    def fail() -> None:
        raise OSError("gone")

    first.begin()
    first.call(fail)
    first.call(lambda: seen.append("skipped"))
    failed = first.record()
    second.wait(failed, needs_data=True)
    second.call(lambda: seen.append("skipped"))
    second.call(lambda: seen.append("always"), always=True)
    inherited = second.record()
    assert inherited.wait(LIMIT_NS)
    assert isinstance(failed.error, OSError)
    assert not failed.is_inherited
    assert inherited.is_inherited
    assert inherited.error is failed.error
    assert seen == ["always"]
    first.close()
    second.close()


def test_work_that_is_skipped_or_refused_is_let_go(compiled):
    """Else every failed unit would keep what its functions hold, for ever."""

    class Held:
        def use(self) -> None:
            raise AssertionError("not to be called")

    queue, held = Queue(compiled.library, "held"), [Held(), Held()]
    watched = [weakref.ref(one) for one in held]
    queue.begin()
    queue.call(lambda: 1 / 0)
    queue.call(held[0].use)
    event = queue.record()
    assert event.wait(LIMIT_NS)
    assert isinstance(event.error, ZeroDivisionError)
    queue.close()
    with pytest.raises(CacheStateError, match="there is no queue"):
        queue.call(held[1].use)
    del held
    gc.collect()
    assert [one() for one in watched] == [None, None]


def test_a_queue_is_not_closed_by_its_own_work(compiled):
    queue = Queue(compiled.library, "self")
    queue.call(queue.close)
    event = queue.record()
    assert event.wait(LIMIT_NS)
    assert "closed by its own work" in str(event.error)
    queue.close()


EXIT = """
import numpy as np
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRun, CopyRuns
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
queue, target, source = Queue(ops.COMPILED.library, "late"), np.zeros((8, 4 << 20), np.uint8), ops.host_alloc(32 << 20)
rows = [(BlockRows(address, 8, 4 << 20, 4 << 20),) for address in (target.ctypes.data, source.address)]
for _ in range(100):
    ops.COMPILED.swap_cache_per_layer(*rows, CopyRuns.of([CopyRun(0, 0, 8)]), queue.id)
"""


@pytest.mark.process
def test_a_process_may_end_with_copies_in_its_queues(compiled):
    """The interpreter frees the memory of its objects; nobody may write there any more."""
    done = run_python(EXIT)
    assert done.returncode == 0, done.stderr


def test_waiting_lets_python_threads_run(compiled):
    """The queue's function needs the interpreter while this thread waits in C for it: holding the GIL would hang."""
    queue, seen = Queue(compiled.library, "python"), []
    queue.call(lambda: seen.append(sum(range(1000))))
    assert queue.record().wait(LIMIT_NS)
    assert seen == [499500]
    queue.close()


def test_the_runtime_uses_queues_where_they_are(compiled):
    runtime = CpuRuntime()
    stream = runtime.new_stream("kv-test")
    stream.begin()
    assert stream.handle != 0
    runtime.close()
    threads = CpuRuntime(compiled=False)
    assert threads.new_stream("kv-test").handle == 0
    threads.close()


def test_a_copy_that_cannot_be_enqueued_fails_its_unit(compiled, memory):
    runtime = CpuRuntime()
    stream = runtime.new_stream("kv-test")
    stream.begin()
    rows = (memory.host_rows, memory.device_rows)
    stream.enqueue(ops.swap_cache_all_layers, *rows, CopyRuns.of([CopyRun(0, 5, 2)]))
    stream.enqueue(ops.swap_cache_all_layers, *rows, RUNS)
    before = memory.host.copy()
    event = stream.record_event()
    with pytest.raises(TransferError, match="a swap writes row 6 of 6"):
        event.wait(20.0)
    assert (memory.host == before).all()
    runtime.close()
