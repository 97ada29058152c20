"""The worker's patch functions against FAKE runners (no GPU code runs here)."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.contract.messages import SwapStep
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import patches as worker_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.causal_mask import init_flash_backend
from tests.fastdeploy_integration.worker.worker_caches import content, fill, register, swap_in, swap_out, task
from tests.flash_attention import flash


@pytest.fixture
def installed(monkeypatch, make_cache):
    cache = make_cache()
    monkeypatch.setattr(worker_patches, "worker_cache", lambda: cache)
    return cache


def test_attention_waits_for_its_layer_only_when_there_is_something_to_wait_for():
    waited = []
    forward = worker_patches.make_attention_forward(lambda self, *given: waited.append("read") or given)
    layer, meta = SimpleNamespace(layer_id=4), SimpleNamespace()
    assert forward(layer, qkv="x", forward_meta=meta) == (None, None, None, "x", None, None, meta)
    setattr(meta, worker_patches.COUNTER, SimpleNamespace(wait_for_layer=waited.append))
    forward(layer, qkv="x", forward_meta=meta)
    indexer = worker_patches.make_indexer_forward(lambda self, *given, rotary_emb: (*given, rotary_emb))
    assert indexer(layer, meta, 1, 2, 3, rotary_emb=4) == (meta, 1, 2, 3, 4)
    assert indexer(layer, meta, 1, 2, rotary_emb=4) == (meta, 1, 2, 4)  # the develop branch passes no positions
    assert waited == ["read", 4, "read", 4, 4]


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

    tasks = [task(SwapStep(0, (swap_out((0, 0)), swap_in((0, 1)))))]
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


@pytest.mark.parametrize(("overlaps", "is_idle"), [(False, True), (True, False)])
def test_an_idle_worker_is_known_where_no_pass_can_begin_unseen(monkeypatch, overlaps, is_idle):
    told = []
    cache = SimpleNamespace(
        report_while_idle=lambda **given: told.append(given), end_forward=lambda **given: told.append(given)
    )
    monkeypatch.setattr(worker_patches, "worker_cache", lambda: cache)
    runner = SimpleNamespace(enable_overlap_schedule=overlaps, current_launch_token_num=0)
    assert worker_patches.not_need_stop(lambda: True, runner, (), {}) is True
    assert told == []
    assert worker_patches.not_need_stop(lambda: False, runner, (), {}) is False
    assert told == [{"is_idle": is_idle}]
    for num_tokens in (0, 3):
        runner.current_launch_token_num = num_tokens
        assert worker_patches.execute_model_or_idle(lambda: "done", runner, (), {}) == "done"
    worker_patches.execute_model(lambda: told.append("computed"), runner, (), {})
    assert told[1:] == [{"is_idle": True}, {"is_idle": False}, "computed", {}]


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
    getattr(proposer.forward_meta, worker_patches.COUNTER).wait_for_layer(1)
    assert waited == ["all", 3]


def test_half_batches_wait_for_the_layers_of_the_whole_one():
    meta = SimpleNamespace(**{worker_patches.COUNTER: "counter"})
    halves = worker_patches.split_batch(lambda *_: [SimpleNamespace(), meta], None, (meta, None), {})
    assert [getattr(half, worker_patches.COUNTER) for half in halves] == ["counter", "counter"]
    plain = SimpleNamespace()
    assert worker_patches.split_batch(lambda **_: [plain], None, (), {"forward_meta": plain}) == [SimpleNamespace()]


# ---- the flash function of a GPU is asked whether it sees a cached prefix


@pytest.mark.parametrize(
    ("version", "forgets_prefix", "refused"), [(2, True, True), (2, False, False), (3, False, False), (4, True, False)]
)
def test_a_flash_function_that_forgets_the_prefix_is_refused(monkeypatch, version, forgets_prefix, refused):
    def attend(q, k, v, cu_q, cu_k, *, max_seqlen_q, max_seqlen_k, causal, num_heads, kv_num_heads, head_dim):
        assert (q.shape[1:], k.shape[1:], causal) == ([num_heads, head_dim], [kv_num_heads, head_dim], True)
        lengths, options = (max_seqlen_q, max_seqlen_k), {"softmax_scale": 1.0, "forgets_prefix": forgets_prefix}
        return flash(q, k, v, cu_q, cu_k, *lengths, causal=causal, **options)

    module = ModuleType("flash_backend_of_the_test")
    module.FLASH_ATTN_VERSION, module.flash_attn_func = version, attend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = type("FlashAttentionBackend", (), {"__module__": module.__name__})()
    made = []
    refusal = pytest.raises(ConfigError, match=r"FlashAttention 2.*FD_ATTENTION_BACKEND=APPEND_ATTN")
    with refusal if refused else nullcontext():
        init_flash_backend(lambda *args, **named: made.append((args, named)), backend, ("config",), {"head_dim": 64})
    assert made == [(("config",), {"head_dim": 64})]
