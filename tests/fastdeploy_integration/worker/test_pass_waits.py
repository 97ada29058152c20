"""What a forward pass does not wait for, and what does not wait for it. What they wait for, tests/gpu sees."""

import threading

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.transport import ROWS_ATTRIBUTE
from fastdeploy_kvcache_v1.metadata import SwapStep
from fastdeploy_kvcache_v1.worker.hazards import Actor
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.fastdeploy_integration.worker.worker_caches import evict, register, task


class Gates:
    """Holds copies back until the test lets them go, stream by stream; `passes` of each are let through."""

    def __init__(self):
        self.semaphores = {name: threading.Semaphore(0) for name in ("input", "output", "compute")}

    def __call__(self, stream):
        name = next(name for name in self.semaphores if name in stream)
        assert self.semaphores[name].acquire(timeout=30)

    def let(self, name, calls=100):
        for _ in range(calls):
            self.semaphores[name].release()


@pytest.fixture
def gates():
    made = Gates()
    yield made
    for name in made.semaphores:
        made.let(name)


@pytest.fixture
def cache(make_cache, gates):
    return make_cache(make_runtime=lambda: CpuRuntime(delay=gates), layer_timeout_s=20)


def prefill(step=None, table=(0,), start=0, end=2, index=0, running=None, **fields):
    made = task(step, table=table, **fields)
    made.idx, made.prefill_start_index, made.prefill_end_index = index, start, end
    if running is not None:
        setattr(made, ROWS_ATTRIBUTE, running)
    return made


def run_pass(cache, *tasks):
    cache.receive(list(tasks))
    waits = cache.begin_forward(layer_by_layer=True)
    cache.end_forward()
    return waits


@pytest.mark.parametrize(
    ("end", "copied", "running"),
    [(6, ((0, 0), (1, 1), (2, 2)), ((0, 7), (1, 0))), (3, ((1, 1),), ((1, 0),))],
    ids=["what a pass before computed", "of a row that ended"],
)
def test_a_pass_does_not_wait_for_a_backup(cache, gates, end, copied, running):
    """A row may decode in block 3 meanwhile. No copy may end before the test says so."""
    register(cache)
    run_pass(cache, prefill(table=(0, 1, 2, 3), end=end))
    run_pass(cache, prefill(SwapStep(0, (evict(*copied),)), (5,), index=1, running=running))
    assert cache._controller.num_unreported_copies == 1, "the pass went on beside the copy"
    gates.let("output")


def test_a_pass_that_was_begun_and_never_ended_counts_with_the_next(make_cache, gates):
    """It may have been submitted all the same."""
    cache = make_cache(make_runtime=lambda: CpuRuntime(delay=gates, threaded_compute=True), layer_timeout_s=20)
    register(cache)
    for computes in (prefill(table=(3, 1), start=2, end=3), prefill(table=(2,))):
        cache.receive([computes])
        cache.begin_forward(layer_by_layer=True)
    cache._controller._runtime.compute_stream.submit(lambda: None)
    cache.end_forward()
    uses = cache._controller._transfers._device_hazards._uses
    (use,) = [use for use in uses if use.actor is Actor.COMPUTE]
    assert (use.reads | use.writes, use.writes) == (0b1110, 0b110)
    gates.let("compute")
