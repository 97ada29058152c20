"""Worker side on CPU tensors: `WorkerCache`, and the patch functions against FAKE runners (no GPU code runs here)."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.base import CacheLayout
from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, TransferError
from fastdeploy_kvcache_v1.fastdeploy_integration import backends
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import patches as worker_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import DRAFT, MAIN, RunningTables, WorkerCache
from fastdeploy_kvcache_v1.metadata import CacheLevel, CacheSwapMetadata, SwapStep
from fastdeploy_kvcache_v1.swap_message import START, encode
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.fastdeploy_integration.engine.fake_scheduler import Control, FakeTask, Kind


def evict(*pairs):
    return CacheSwapMetadata(CacheLevel.DEVICE, CacheLevel.HOST, *map(tuple, zip(*pairs, strict=True)))


def swap_in(*pairs):
    return CacheSwapMetadata(CacheLevel.HOST, CacheLevel.DEVICE, *map(tuple, zip(*pairs, strict=True)))


def task(step=None, previous=START, table=(0,)):
    made = FakeTask("r", [1])
    made.idx, made.block_tables = 0, list(table)
    if step is not None:
        setattr(made, SWAP_ATTRIBUTE, encode(step, previous))
    return made


def make_cache(parts=(MAIN,), host_blocks=4, **settings):
    return WorkerCache(
        num_host_blocks=host_blocks, block_size=2, make_runtime=CpuRuntime, parts=parts, layer_timeout_s=5.0, **settings
    )


def register(cache, part=MAIN, layers=2, blocks=6, first_layer=0, heads=1):
    backend = GQACacheBackend(layers, heads, 3, 2, "float32")
    tensors = backend.create_kv_cache(blocks, first_layer=first_layer)
    cache.register(part, backend.layout, tensors, blocks)
    return tensors


def fill(tensors, slot, value):
    for number, tensor in enumerate(tensors.values()):
        tensor[slot] = value + number


def content(tensors, slot):
    return [float(np.unique(tensor[slot].numpy()).item()) for tensor in tensors.values()]


def test_blocks_go_out_and_come_back_layer_by_layer():
    cache = make_cache()
    tensors = register(cache)
    fill(tensors, 1, 10)
    cache.receive([task(SwapStep(0, (evict((1, 3)),)), table=[1])])
    assert cache.begin_forward(layer_by_layer=True) is None  # waits: the pass writes what is being read
    fill(tensors, 1, 0)
    cache.end_forward()
    cache.receive([task(SwapStep(1, (swap_in((3, 5)),)), previous=0)])
    counter = cache.begin_forward(layer_by_layer=True)
    assert counter.target_slots == (5,)
    counter.wait_for_layer(0)
    counter.wait_for_layer(1)
    cache.end_forward()
    assert content(tensors, 5) == [10, 11, 12, 13]
    assert cache.current_counter is None
    cache.unregister(MAIN)


def test_graphs_wait_for_all_layers_before_they_start():
    cache = make_cache()
    tensors = register(cache)
    fill(tensors, 0, 7)
    cache.receive([task(SwapStep(0, (evict((0, 0)), swap_in((0, 4)))))])
    assert cache.begin_forward(layer_by_layer=False) is None
    assert content(tensors, 4) == [7, 8, 9, 10]
    cache.end_forward()
    cache.unregister(MAIN)


def test_swap_ins_of_skipped_passes_are_waited_for():
    cache = make_cache()
    tensors = register(cache)
    fill(tensors, 0, 7)
    cache.receive([task(SwapStep(0, (evict((0, 0)), swap_in((0, 4)))))])
    cache.end_forward()  # the worker was asleep: no pass began
    cache.receive([task(SwapStep(1, (swap_in((0, 5)),)), previous=0)])
    counter = cache.begin_forward(layer_by_layer=True)
    assert counter.target_slots == (5,)
    assert content(tensors, 4) == [7, 8, 9, 10]
    counter.wait_all()
    cache.end_forward()
    cache.unregister(MAIN)


def test_a_step_that_runs_no_layer_leaves_nothing_to_wait_for():
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
    cache.unregister(MAIN)


@pytest.mark.parametrize("order", [(MAIN, DRAFT), (DRAFT, MAIN)])
def test_draft_layers_are_swapped_with_the_main_models(order):
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
    cache.unregister(DRAFT)
    cache.unregister(MAIN)


def test_a_draft_model_of_another_shape_is_refused():
    cache = make_cache(parts=(MAIN, DRAFT))
    register(cache)
    with pytest.raises(ConfigError, match="draft model whose layers are cached like"):
        register(cache, DRAFT, heads=2)


def test_a_draft_model_with_fewer_blocks_is_refused():
    cache = make_cache(parts=(MAIN, DRAFT))
    register(cache)
    with pytest.raises(ConfigError, match="fewer blocks"):
        register(cache, DRAFT, blocks=5)


def test_tensors_may_be_made_again():
    cache = make_cache()
    register(cache)
    tensors = register(cache)
    fill(tensors, 0, 3)
    cache.receive([task(SwapStep(0, (evict((0, 0)), swap_in((0, 1)))))])
    cache.begin_forward(layer_by_layer=False)
    assert content(tensors, 1) == [3, 4, 5, 6]
    cache.end_forward()
    cache.unregister(MAIN)


def addresses(cache):
    """Where the host tier is."""
    return cache._controller.host_pool.block(0).ctypes.data


def test_host_memory_stays_while_tensors_are_made_again():
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
    cache.unregister(DRAFT)
    cache.unregister(MAIN)


@pytest.mark.parametrize(("keep", "num_freed"), [(True, 0), (False, 1)])
def test_who_gives_host_memory_back(monkeypatch, keep, num_freed):
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
    cache.unregister(MAIN)


@pytest.mark.parametrize(("expected", "num_warnings"), [(None, 0), (96, 0), (97, 1)])
def test_memory_that_the_engine_did_not_expect_is_reported(caplog, expected, num_warnings):
    cache = make_cache(expected_block_bytes=expected)
    with caplog.at_level("WARNING"):
        register(cache)
    assert len(caplog.messages) == num_warnings
    cache.unregister(MAIN)


def test_swaps_without_caches_are_an_error():
    cache = make_cache()
    with pytest.raises(CacheStateError, match="while there are no caches"):
        cache.receive([task(SwapStep(0, (evict((0, 0)),)))])


def broken(*_args, **_kwargs):
    raise OSError("bus error")


def run_pass(cache):
    """A pass that reads and writes nothing, when all copies have ended."""
    cache._controller.drain(5.0)
    cache.begin_forward(layer_by_layer=True)
    cache.end_forward()


def test_a_failed_copy_into_the_device_stops_the_worker(monkeypatch):
    cache = make_cache()
    register(cache)
    cache.receive([task(SwapStep(0, (evict((0, 0)),)))])
    run_pass(cache)
    monkeypatch.setattr("fastdeploy_kvcache_v1.worker.ops.swap_cache_per_layer", broken)
    cache.receive([task(SwapStep(1, (swap_in((0, 4)),)), previous=0)])
    with pytest.raises(TransferError, match=r"bus error"):
        run_pass(cache)
    monkeypatch.undo()
    cache.unregister(MAIN)


def test_a_failed_copy_into_the_host_tier_is_told_and_the_worker_goes_on(monkeypatch):
    told = []
    cache = make_cache(tell_copies=told.append)
    tensors = register(cache)
    monkeypatch.setattr("fastdeploy_kvcache_v1.worker.ops.swap_cache_all_layers", broken)
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
    cache.unregister(MAIN)


def test_a_copy_back_from_a_host_slot_whose_copy_failed_stops_the_worker(monkeypatch):
    """The engine did not learn of it in time: a block without its content must not be computed with."""
    cache = make_cache()
    register(cache)
    monkeypatch.setattr("fastdeploy_kvcache_v1.worker.ops.swap_cache_all_layers", broken)
    cache.receive([task(SwapStep(0, (evict((0, 2)),)))])
    run_pass(cache)
    monkeypatch.undo()
    cache.receive([task(SwapStep(1, (swap_in((2, 4)),)), previous=0)])
    with pytest.raises(TransferError, match=r"bus error"):
        run_pass(cache)
    cache.unregister(MAIN)


def test_without_host_blocks_there_is_no_controller():
    cache = make_cache(host_blocks=0)
    register(cache)
    cache.receive([task()])
    assert cache.begin_forward(layer_by_layer=True) is None
    cache.end_forward()
    cache.unregister(MAIN)


def test_which_slots_a_pass_may_write():
    tables = RunningTables(spare_blocks=1)
    first = task(table=[3, 4, 5])
    first.prefill_start_index = 2
    tables.update([first], block_size=2)
    assert tables.written() == {4, 5}
    first.block_tables = [3, 4, 5, 6]
    tables.update([Control(Kind.DECODE, first)], block_size=2)
    assert tables.written() == {5, 6}
    assert tables.written(without=(6,)) == {5}
    tables.update([Control(Kind.PREEMPTED, first)], block_size=2)
    assert tables.written() == set()


# ---- patch functions against fake runners


@pytest.fixture
def installed(monkeypatch):
    cache = make_cache()
    monkeypatch.setattr(worker_patches, "_worker_cache", cache)
    return cache


def test_attention_waits_for_its_layer_only_when_there_is_something_to_wait_for():
    waited = []
    forward = worker_patches.make_attention_forward(lambda self, *given: given)
    layer, meta = SimpleNamespace(layer_id=4), SimpleNamespace()
    assert forward(layer, qkv="x", forward_meta=meta) == (None, None, None, "x", None, None, meta)
    setattr(meta, worker_patches.COUNTER, SimpleNamespace(wait_for_layer=waited.append))
    forward(layer, qkv="x", forward_meta=meta)
    indexer = worker_patches.make_indexer_forward(lambda self, *given, rotary_emb: (*given, rotary_emb))
    assert indexer(layer, meta, 1, 2, 3, rotary_emb=4) == (meta, 1, 2, 3, 4)
    assert indexer(layer, meta, 1, 2, rotary_emb=4) == (meta, 1, 2, 4)  # the develop branch passes no positions
    assert waited == [4, 4, 4]


@pytest.mark.parametrize(
    ("cudagraph", "level", "dummy", "waits_in_layers"),
    [(False, 0, False, True), (True, 0, False, False), (False, 1, False, False), (False, 0, True, False)],
)
def test_how_a_pass_waits(installed, cudagraph, level, dummy, waits_in_layers):
    tensors = register(installed)
    fill(tensors, 0, 1)
    runner = SimpleNamespace(fd_config=SimpleNamespace(graph_opt_config=SimpleNamespace(graph_opt_level=level)))

    def original(is_dummy_or_profile_run=False):
        runner.forward_meta = SimpleNamespace(step_use_cudagraph=cudagraph)

    tasks = [task(SwapStep(0, (evict((0, 0)), swap_in((0, 1)))))]
    inserted = worker_patches.insert_tasks(lambda *given: given, runner, (tasks, 1), {})
    assert inserted == (tasks, 1)
    worker_patches.initialize_forward_meta(original, runner, (), {"is_dummy_or_profile_run": dummy})
    counter = getattr(runner.forward_meta, worker_patches.COUNTER, None)
    assert (counter is not None) == waits_in_layers
    if dummy:
        worker_patches.initialize_forward_meta(original, runner, (), {})
        counter = getattr(runner.forward_meta, worker_patches.COUNTER)
    if counter is not None:
        counter.wait_all()
    assert content(tensors, 1) == [1, 2, 3, 4]
    assert worker_patches.execute_model(lambda: "done", runner, (), {}) == "done"
    installed.unregister(MAIN)


def test_draft_attention_counts_its_layers_after_the_main_models(installed):
    register(installed)
    waited = []
    installed.current_counter = SimpleNamespace(wait_for_layer=waited.append, wait_all=lambda: waited.append("all"))
    proposer = SimpleNamespace()
    for cudagraph in (False, True):

        def original(is_dummy_run=False, use=cudagraph):
            proposer.forward_meta = SimpleNamespace(step_use_cudagraph=use)

        worker_patches.initialize_draft_forward_meta(original, proposer, (), {"is_dummy_run": True})
        assert not hasattr(proposer.forward_meta, worker_patches.COUNTER)
        worker_patches.initialize_draft_forward_meta(original, proposer, (), {})
    assert waited == ["all"]
    worker_patches.initialize_draft_forward_meta(
        lambda: setattr(proposer, "forward_meta", SimpleNamespace(step_use_cudagraph=False)), proposer, (), {}
    )
    getattr(proposer.forward_meta, worker_patches.COUNTER).wait_for_layer(0)
    assert waited == ["all", 2]
    installed.unregister(MAIN)


def test_half_batches_wait_for_the_layers_of_the_whole_one():
    meta = SimpleNamespace(**{worker_patches.COUNTER: "counter"})
    halves = worker_patches.split_batch(lambda *_: [SimpleNamespace(), meta], None, (meta, None), {})
    assert [getattr(half, worker_patches.COUNTER) for half in halves] == ["counter", "counter"]
    plain = SimpleNamespace()
    assert worker_patches.split_batch(lambda **_: [plain], None, (), {"forward_meta": plain}) == [SimpleNamespace()]


# ---- create_kv_cache against FAKE backends with the attributes and shapes of FastDeploy's


class AppendAttentionBackend:
    kv_num_heads, head_dim, block_size = 2, 8, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        shape = [max_num_blocks, 2, 4, 4 if kv_cache_quant_type == "int4_zp" else 8]
        return shape, shape


class MLAAttentionBackend:
    kv_lora_rank, qk_rope_head_dim, block_size = 512, 64, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return [max_num_blocks, 1, 4, 576], []


class DSAAttentionBackend:
    kv_lora_rank, qk_rope_head_dim, index_head_dim, block_size = 512, 64, 128, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return [max_num_blocks, 1, 4, 656], [], [max_num_blocks, 4, 132]


@pytest.mark.parametrize(
    ("backend", "quant_type", "shapes", "dtypes"),
    [
        (AppendAttentionBackend, None, [[3, 2, 4, 8]] * 2, ["float32"] * 2),
        (AppendAttentionBackend, "int8", [[3, 2, 4, 8]] * 2, ["uint8"] * 2),
        (AppendAttentionBackend, "int4_zp", [[3, 2, 4, 4]] * 2, ["uint8"] * 2),
        (
            AppendAttentionBackend,
            "block_wise_fp8",
            [[3, 2, 4, 8]] * 2 + [[3, 2, 4]] * 2,
            ["uint8", "uint8", "float32", "float32"],
        ),
        (MLAAttentionBackend, None, [[3, 1, 4, 576]], ["float32"]),
        (DSAAttentionBackend, "uint8", [[3, 1, 4, 656], [3, 4, 132]], ["uint8"] * 2),
    ],
)
def test_tensors_of_each_layout(backend, quant_type, shapes, dtypes):
    made = backends.create_kv_cache(
        backend(), 3, 2, dtype="float32", quant_type=quant_type, rank=1, device=5, first_layer=7
    )
    tensors = list(made.values())
    assert [tensor.shape for tensor in tensors] == shapes * 2
    assert [str(tensor.dtype).rpartition(".")[2] for tensor in tensors] == dtypes * 2
    assert not any(tensor.numpy().any() for tensor in tensors)
    assert next(iter(made)) == "key_caches_7_rank1.device5"
    assert next(reversed(made)).rpartition("_")[0].endswith("_8")


def test_layouts_that_kernels_do_not_read_are_refused():
    with pytest.raises(ConfigError, match="MLA attention with block_wise_fp8"):
        backends.create_kv_cache(MLAAttentionBackend(), 1, 1, dtype="bfloat16", quant_type="block_wise_fp8")


def test_a_backend_whose_shape_drifted_is_refused():
    backend = AppendAttentionBackend()
    backend.get_kv_cache_shape = lambda max_num_blocks, kv_cache_quant_type: ([1, 4, 2, 8], [1, 4, 2, 8])
    with pytest.raises(ConfigError, match=r"AppendAttentionBackend wants cache blocks of \[\(1, 4, 2, 8\)"):
        backends.create_kv_cache(backend, 1, 1, dtype="bfloat16")


def test_layout_needs_layers():
    with pytest.raises(ConfigError, match="num_layers must be at least 1"):
        CacheLayout(0, ())
