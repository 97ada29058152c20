"""Queues of the compiled core through ctypes. That streams over them keep their promises is shown by the suite of all
runtimes.
"""

from __future__ import annotations

import gc
import weakref

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
from tests.worker.ops.native import ROOT, require_core, run_python

LIMIT_NS = 20_000_000_000


@pytest.fixture
def compiled():
    return require_core()


@pytest.fixture
def queue(compiled):
    queue = Queue(compiled.library, "test")
    yield queue
    queue.close()


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


@pytest.mark.process
def test_a_process_may_end_with_copies_in_its_queues(compiled):
    """The interpreter frees the memory of its objects; nobody may write there any more."""
    done = run_python((ROOT / "tests/worker/ops/ends_with_copies.py").read_text())
    assert done.returncode == 0, done.stderr
