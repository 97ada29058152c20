"""`WorkerCache` on CPU tensors. Its copies and waits are those of the world's ranks: tests/world/ranks.py."""

import pytest

from fastdeploy_kvcache_v1.contract.messages import CacheLevel, SwapStep
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import ROWS_ATTRIBUTE
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.storage import RankStorage
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import DRAFT, MAIN
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.fastdeploy_integration.worker.worker_caches import register, swap_in, swap_out, task
from tests.world.streams import Clock, VirtualDevice


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

    run_pass(SwapStep(0, (swap_out((1, 3)),)))
    run_pass(SwapStep(1, (swap_in((3, 5)),)))
    run_pass(SwapStep(2, (swap_in((3, 4)),)), layer_by_layer=False)
    timed = [prefill for report in reports for prefill in report.prefills]
    assert [(each.num_tokens, each.num_positions) for each in timed] == [
        (100, (110**2 - 10**2) / 2),
        (300, (310**2 - 10**2) / 2),
    ]
    assert all(each.seconds >= 0 for each in timed)


def test_what_was_counted_outlives_the_tensors_also_where_blocks_change(make_cache):
    reports = []
    cache = make_cache(tell_copies=reports.append)
    for step, layers in enumerate((1, 2)):
        register(cache, layers=layers)
        cache.receive([task(SwapStep(step, (swap_out((1, 3)),)), previous=step - 1)])
        cache.begin_forward(layer_by_layer=False)
        cache._controller.transfers.drain()
        cache.end_forward()
        cache.unregister(MAIN)
    assert reports[-1].copies.swap_out.blocks == 2


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


def test_a_step_that_runs_no_layer_leaves_nothing_to_wait_for(make_cache):
    """FastDeploy prepares a step, finds no tokens in it, and does not run the model (or not its draft model)."""
    cache = make_cache()
    register(cache)
    cache.receive([task(SwapStep(0, (swap_out((0, 0)), swap_in((0, 4)))))])
    counter = cache.begin_forward(layer_by_layer=True)
    waited = []
    counter.wait_all = lambda: waited.append("all")
    cache.end_forward()
    assert waited == ["all"]
    assert cache.begin_forward(layer_by_layer=True) is None
    cache.end_forward()


def test_a_step_waits_at_once_for_the_swap_ins_of_skipped_ones(make_cache):
    """What it writes may be their targets, which were evicted since: they are none of its own."""
    cache = make_cache()
    register(cache)
    cache.receive([task(SwapStep(0, (swap_in((0, 1)),)))])
    cache.receive([task(SwapStep(1, (swap_out((1, 2)),)), previous=0, table=(1,))])
    waits = cache.begin_forward(layer_by_layer=True)
    assert waits is None or 1 not in waits.target_slots
    cache.end_forward()


@pytest.mark.parametrize(
    ("draft", "reason"), [({"heads": 2}, "another layout than the main model"), ({"blocks": 5}, "fewer blocks")]
)
def test_a_draft_model_that_does_not_fit_is_refused(make_cache, draft, reason):
    cache = make_cache(parts=(MAIN, DRAFT))
    register(cache)
    with pytest.raises(ConfigError, match=reason):
        register(cache, DRAFT, **draft)


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
    assert not cache.has_host_tier
    with pytest.raises(CacheStateError, match="while there are no caches"):
        cache.receive([task(SwapStep(0, (swap_out((0, 0)),)))])
    register(cache, heads=2)  # blocks look different now: kept memory is of no use
    assert len(freed) == 1
    assert cache._controller.host_pool.layout.block_bytes == 2 * freed[0] // 4


@pytest.mark.parametrize(("expected", "num_warnings"), [(None, 0), (96, 0), (97, 1)])
def test_memory_that_the_engine_did_not_expect_is_reported(make_cache, caplog, expected, num_warnings):
    cache = make_cache(expected_block_bytes=expected)
    with caplog.at_level("WARNING"):
        register(cache)
    assert len(caplog.messages) == num_warnings


# ---- what a pass does not wait for


@pytest.fixture
def virtual(make_cache):
    """No copy and no pass ends before it is waited for."""
    made = make_cache(make_runtime=lambda: VirtualDevice(Clock()))
    register(made)
    made.stream = made._controller._runtime.compute_stream
    return made


def prefill(step=None, table=(0,), start=0, end=2, index=0):
    made = task(step, table=table)
    made.idx, made.prefill_start_index, made.prefill_end_index = index, start, end
    return made


@pytest.mark.parametrize(
    ("end", "copied", "running"),
    [(6, ((0, 0), (1, 1), (2, 2)), ((0, 7), (1, 0))), (3, ((1, 1),), ((1, 0),))],
    ids=["of what a pass before computed", "of a row that ended"],
)
def test_a_pass_does_not_wait_for_a_backup(virtual, end, copied, running):
    """A row may decode in block 3 meanwhile."""
    second = prefill(SwapStep(0, (swap_out(*copied),)), (5,), index=1)
    setattr(second, ROWS_ATTRIBUTE, running)
    for arrived in (prefill(table=(0, 1, 2, 3), end=end), second):
        virtual.receive([arrived])
        virtual.begin_forward(layer_by_layer=True)
        virtual.end_forward()
    while virtual.stream.run():
        pass
    assert not virtual.stream.waiting, "it went on beside the copy"
    assert virtual._controller.transfers.num_unreported == 1


def test_a_pass_that_was_begun_and_never_ended_counts_with_the_next(virtual):
    """It may have been submitted all the same."""
    for arrived in (prefill(table=(3, 1), start=2, end=3), prefill(table=(2,))):
        virtual.receive([arrived])
        virtual.begin_forward(layer_by_layer=True)
    virtual.stream.submit(lambda: None)
    virtual.end_forward()
    (_fill, use) = virtual._controller.transfers._device_hazards._uses
    assert ({*use.reads | use.writes}, {*use.writes}) == ({1, 2, 3}, {1, 2})


def test_a_failed_copy_into_the_host_tier_is_told_and_the_worker_goes_on(make_cache):
    told = []
    device = VirtualDevice(Clock(), lambda stream: stream == "kv-swap_out")
    cache = make_cache(make_runtime=lambda: device, tell_copies=told.append)
    register(cache)
    cache.receive([task(SwapStep(0, (swap_out((0, 2), (1, 3)),)))])
    cache._controller.transfers.drain(5.0)
    cache.begin_forward(layer_by_layer=True)
    cache.end_forward()
    (result,) = [each for report in told for each in report.transfers]
    assert (result.target, result.target_slots, "injected" in result.error) == (CacheLevel.HOST, (2, 3), True)
