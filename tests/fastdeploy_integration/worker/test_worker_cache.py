"""`WorkerCache` on CPU tensors: copies, tensors that are made again, failed copies."""

import threading

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, LayerSwapTimeoutError, TransferError
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.storage import RankStorage
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import DRAFT, MAIN
from fastdeploy_kvcache_v1.metadata import CacheLevel, SwapStep
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.fastdeploy_integration.worker.worker_caches import content, evict, fill, register, swap_in, task


def test_an_idle_worker_tells_what_became_of_its_last_copies(make_cache):
    open_gate, reports = threading.Event(), []
    cache = make_cache(
        make_runtime=lambda: CpuRuntime(delay=lambda stream: open_gate.wait(30)), tell_copies=reports.append
    )
    cache.report_while_idle()
    register(cache)
    cache.receive([task(SwapStep(0, (evict((1, 3)),)))])
    cache.end_forward()
    open_gate.set()
    while not any(report.transfers for report in reports):
        cache.report_while_idle()
    assert [report.ended_through for report in reports if report.transfers] == [0]
    told = len(reports)
    cache.report_while_idle()
    assert len(reports) == told, "nothing is open any more"


def test_passes_that_compute_prompts_are_timed_unless_they_wait_for_a_copy_inside(make_cache):
    reports = []
    cache = make_cache(tell_copies=reports.append)
    register(cache)

    def run_pass(step, *, layer_by_layer=True):
        arrived = task(step, previous=step.step - 1)
        arrived.prefill_start_index, arrived.prefill_end_index = 10, 10 + 100 * (step.step + 1)
        cache.receive([arrived])
        counter = cache.begin_forward(layer_by_layer=layer_by_layer)
        if counter is not None:
            counter.wait_all()
        cache.end_forward()

    run_pass(SwapStep(0, (evict((1, 3)),)))
    run_pass(SwapStep(1, (swap_in((3, 5)),)))
    run_pass(SwapStep(2, (swap_in((3, 4)),)), layer_by_layer=False)
    timed = [prefill for report in reports for prefill in report.prefills]
    assert [(each.num_tokens, each.num_positions) for each in timed] == [
        (100, (110**2 - 10**2) / 2),
        (300, (310**2 - 10**2) / 2),
    ]
    assert all(each.seconds >= 0 for each in timed)


class RecordingStorage(RankStorage):
    uses_device_tier = True

    def __init__(self):
        self.used = []

    def use(self, controller):
        self.used.append(controller.caches)

    def let_go(self):
        self.used.append(None)
        return True


def test_storage_of_device_blocks_needs_no_host_tier_and_hears_of_passes(make_cache):
    reports, storage = [], RecordingStorage()
    cache = make_cache(host_blocks=0, storage=storage, tell_copies=reports.append)
    tensors = register(cache)
    assert [list(used) for used in storage.used] == [list(tensors)]
    assert not cache.has_host_tier
    cache.report_while_idle()
    assert [(each.passes.step, each.passes.is_idle) for each in reports] == [(-1, True)]
    cache.receive([task(SwapStep(0))])
    cache.begin_forward(layer_by_layer=True)
    cache.end_forward()
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (0, False)
    cache.receive([task(SwapStep(1), previous=0)])
    cache.begin_forward(layer_by_layer=True)
    cache.end_forward(is_idle=True)
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (1, True)
    cache.unregister(MAIN)
    assert storage.used[1:] == [None], "before the tensors go"
    told = len(reports)
    cache.report_while_idle()
    cache.end_forward()
    assert len(reports) == told, "without tensors nothing can be said of them"


def test_the_draft_models_layers_are_stored_with_the_others(make_cache):
    storage = RecordingStorage()
    cache = make_cache(parts=(MAIN, DRAFT), host_blocks=0, storage=storage)
    register(cache, MAIN)
    assert storage.used == []
    register(cache, DRAFT, layers=1, blocks=9, first_layer=2)
    assert len(storage.used[0]) == 6


def test_swap_ins_of_skipped_passes_are_waited_for(make_cache):
    cache = make_cache()
    tensors = register(cache)
    fill(tensors, 0, 7)
    cache.receive([task(SwapStep(0, (evict((0, 0)), swap_in((0, 4)))))])
    cache.end_forward()  # the worker was asleep: no pass began
    cache.receive([task(SwapStep(1, (swap_in((0, 5)),)), previous=0)])
    counter = cache.begin_forward(layer_by_layer=True)
    assert counter.target_slots == {5}
    assert content(tensors, 4) == [7, 8, 9, 10]
    counter.wait_all()
    cache.end_forward()


def test_a_slot_evicted_after_a_skipped_pass_is_not_written_before_its_copy_was_read(make_cache):
    """Its swap-in is the last one, but no longer of the last step: the slot belongs to a row that writes it."""
    may_run = {"kv-output": threading.Event(), "kv-input": threading.Event()}
    cache = make_cache(make_runtime=lambda: CpuRuntime(delay=lambda stream: may_run[stream].wait(30)))
    for gate in may_run.values():
        gate.set()
    tensors = register(cache)
    fill(tensors, 0, 7)
    cache.receive([task(SwapStep(0, (evict((0, 0)), swap_in((0, 4)))))])
    cache.end_forward()  # no pass began
    cache._controller.drain(5.0)
    may_run["kv-output"].clear()
    cache.receive([task(SwapStep(1, (evict((4, 1)),)), previous=0, table=[4])])
    waits = cache.begin_forward(layer_by_layer=True)
    threading.Timer(0.2, may_run["kv-output"].set).start()
    waits.wait_all()
    fill(tensors, 4, 50)
    cache.end_forward()
    cache.receive([task(SwapStep(2, (swap_in((1, 5)),)), previous=1)])
    cache.begin_forward(layer_by_layer=False)
    assert content(tensors, 5) == [7, 8, 9, 10]
    cache.end_forward()


def test_a_step_that_runs_no_layer_leaves_nothing_to_wait_for(make_cache):
    """FastDeploy prepares a step, finds no tokens in it, and does not run the model (or not its draft model)."""
    cache = make_cache()
    register(cache)
    cache.receive([task(SwapStep(0, (evict((0, 0)), swap_in((0, 4)))))])
    counter = cache.begin_forward(layer_by_layer=True)
    waited = []
    counter.wait_all = lambda: waited.append("all")
    cache.end_forward()
    assert waited == ["all"]
    assert cache.begin_forward(layer_by_layer=True) is None
    cache.end_forward()


@pytest.mark.parametrize("order", [(MAIN, DRAFT), (DRAFT, MAIN)])
def test_draft_layers_are_swapped_with_the_main_models(make_cache, order):
    cache = make_cache(parts=(MAIN, DRAFT))
    made = {}
    for part in order:
        layers, first, blocks = (2, 0, 6) if part is MAIN else (1, 2, 9)
        made[part] = register(cache, part, layers, blocks, first)
    assert list(made[DRAFT]) == ["key_caches_2_rank0.device0", "value_caches_2_rank0.device0"]
    fill(made[MAIN], 1, 10)
    fill(made[DRAFT], 1, 50)
    cache.receive([task(SwapStep(0, (evict((1, 0)), swap_in((0, 2)))))])
    counter = cache.begin_forward(layer_by_layer=True)
    assert counter.num_layers == 3
    counter.wait_all()
    assert content(made[MAIN], 2) + content(made[DRAFT], 2) == [10, 11, 12, 13, 50, 51]
    cache.end_forward()


@pytest.mark.parametrize(
    ("draft", "reason"), [({"heads": 2}, "layers are cached like"), ({"blocks": 5}, "fewer blocks")]
)
def test_a_draft_model_that_does_not_fit_is_refused(make_cache, draft, reason):
    cache = make_cache(parts=(MAIN, DRAFT))
    register(cache)
    with pytest.raises(ConfigError, match=reason):
        register(cache, DRAFT, **draft)


def addresses(cache):
    """Where the host tier is."""
    return cache._controller.host_pool.block(0).ctypes.data


@pytest.mark.parametrize("order", [(MAIN, DRAFT), (DRAFT, MAIN)])
def test_a_swap_in_waits_for_the_fill_of_all_tensors_however_often_they_are_made(make_cache, order):
    """A start, a wakeup or new weights, a draft model made again: main and draft tensors in either order."""
    may_fill = threading.Event()
    runtime = CpuRuntime(threaded_compute=True, delay=lambda stream: stream != "compute" or may_fill.wait(30))
    cache = make_cache(parts=(MAIN, DRAFT), make_runtime=lambda: runtime, keep_host_memory=True)
    tensors = {}

    def make(part):
        first, count = (0, 2) if part == MAIN else (2, 1)
        backend = GQACacheBackend(count, 1, 3, 2, "float32")
        tensors[part] = backend.create_kv_cache(6, first_layer=first)
        for tensor in tensors[part].values():
            runtime.compute_stream.submit(tensor.zero_)
        cache.register(part, backend.layout, tensors[part], 6)

    for step, made in enumerate((order, order, (DRAFT,))):
        for part in made if step else ():
            cache.unregister(part)
        may_fill.clear()
        for part in made:
            make(part)
        cache._controller.host_pool.block(1)[:] = 7
        cache.receive([task(SwapStep(step, (swap_in((1, 4)),)), previous=step - 1)])
        with pytest.raises(LayerSwapTimeoutError):
            cache._controller.drain(0.2)
        may_fill.set()
        cache._controller.drain(30)
        runtime.compute_stream.synchronize()
        for tensor in (*tensors[MAIN].values(), *tensors[DRAFT].values()):
            assert (tensor[4].numpy().view(np.uint8) == 7).all(), f"turn {step}"


def test_host_memory_stays_while_tensors_are_made_again(make_cache):
    cache = make_cache(parts=(MAIN, DRAFT), keep_host_memory=True)
    register(cache)
    register(cache, DRAFT, 1, 9, 2)
    before = addresses(cache)
    for order in ((MAIN, DRAFT), (DRAFT, MAIN)):
        for part in order:
            cache.unregister(part)
        assert not cache.has_host_tier
        with pytest.raises(CacheStateError, match="while there are no caches"):
            cache.receive([task(SwapStep(0, (evict((0, 0)),)))])
        tensors = {part: register(cache, part, *((2, 6, 0) if part is MAIN else (1, 9, 2))) for part in order}
        assert addresses(cache) == before
        fill(tensors[MAIN], 0, 7)
        fill(tensors[DRAFT], 0, 30)
        cache.receive([task(SwapStep(1, (evict((0, 0)), swap_in((0, 4)))))])
        cache.begin_forward(layer_by_layer=False)
        assert content(tensors[MAIN], 4) + content(tensors[DRAFT], 4) == [7, 8, 9, 10, 30, 31]
        cache.end_forward()


@pytest.mark.parametrize(("keep", "num_freed"), [(True, 0), (False, 1)])
def test_who_gives_host_memory_back(make_cache, monkeypatch, keep, num_freed):
    freed, free_host = [], CpuRuntime.free_host

    def count(runtime, buffer):
        freed.append(buffer.nbytes)
        free_host(runtime, buffer)

    monkeypatch.setattr(CpuRuntime, "free_host", count)
    cache = make_cache(keep_host_memory=keep)
    register(cache)
    cache.unregister(MAIN)
    assert len(freed) == num_freed
    register(cache, heads=2)  # blocks look different now: kept memory is of no use
    assert len(freed) == 1
    assert cache._controller.host_pool.layout.block_bytes == 2 * freed[0] // 4


@pytest.mark.parametrize(("expected", "num_warnings"), [(None, 0), (96, 0), (97, 1)])
def test_memory_that_the_engine_did_not_expect_is_reported(make_cache, caplog, expected, num_warnings):
    cache = make_cache(expected_block_bytes=expected)
    with caplog.at_level("WARNING"):
        register(cache)
    assert len(caplog.messages) == num_warnings


def broken(*_args, **_kwargs):
    raise OSError("bus error")


def run_pass(cache):
    """A pass that reads and writes nothing, when all copies have ended."""
    cache._controller.drain(5.0)
    cache.begin_forward(layer_by_layer=True)
    cache.end_forward()


def test_a_failed_copy_into_the_device_stops_the_worker(make_cache, monkeypatch):
    cache = make_cache()
    register(cache)
    cache.receive([task(SwapStep(0, (evict((0, 0)),)))])
    run_pass(cache)
    monkeypatch.setattr("fastdeploy_kvcache_v1.worker.ops.swap_cache_per_layer", broken)
    cache.receive([task(SwapStep(1, (swap_in((0, 4)),)), previous=0)])
    with pytest.raises(TransferError, match=r"bus error"):
        run_pass(cache)


def test_a_failed_copy_into_the_host_tier_is_told_and_the_worker_goes_on(make_cache, monkeypatch):
    told = []
    cache = make_cache(tell_copies=told.append)
    tensors = register(cache)
    for op in ("swap_cache_all_layers", "swap_cache_per_layer"):
        monkeypatch.setattr(f"fastdeploy_kvcache_v1.worker.ops.{op}", broken)
    cache.receive([task(SwapStep(0, (evict((0, 2), (1, 3)),)))])
    run_pass(cache)
    monkeypatch.undo()
    results = [each for report in told for each in report.transfers]
    assert [(each.step, each.target, each.target_slots) for each in results] == [(0, CacheLevel.HOST, (2, 3))]
    assert "bus error" in results[0].error

    fill(tensors, 5, 40)  # slot 2 gets its block after all; slot 3 never
    cache.receive([task(SwapStep(1, (evict((5, 2)), swap_in((1, 4)))), previous=0)])
    run_pass(cache)
    cache.receive([task(SwapStep(2, (swap_in((2, 0)),)), previous=1)])
    run_pass(cache)
    assert content(tensors, 0) == [40, 41, 42, 43]


def test_a_copy_back_from_a_host_slot_whose_copy_failed_stops_the_worker(make_cache, monkeypatch):
    """The engine did not learn of it in time: a block without its content must not be computed with."""
    cache = make_cache()
    register(cache)
    for op in ("swap_cache_all_layers", "swap_cache_per_layer"):
        monkeypatch.setattr(f"fastdeploy_kvcache_v1.worker.ops.{op}", broken)
    cache.receive([task(SwapStep(0, (evict((0, 2)),)))])
    run_pass(cache)
    monkeypatch.undo()
    cache.receive([task(SwapStep(1, (swap_in((2, 4)),)), previous=0)])
    with pytest.raises(TransferError, match=r"bus error"):
        run_pass(cache)


def test_without_host_blocks_there_is_no_controller(make_cache):
    cache = make_cache(host_blocks=0)
    register(cache)
    cache.receive([task()])
    assert cache.begin_forward(layer_by_layer=True) is None
    cache.end_forward()
