"""create_kv_cache on FastDeploy's real attention backends; every worker row applied to the real classes; over FAKE
custom ops, what its real model runner and proposer allocate. No kernel is run.
"""

import importlib
import importlib.util
from types import ModuleType, SimpleNamespace

import paddle
import pytest

import fastdeploy  # noqa: F401
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Where
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import patches as worker_patches
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime

ATTENTION = "fastdeploy.model_executor.layers.attention"
FIELDS = {
    "kv_num_heads": 2,
    "head_dim": 16,
    "block_size": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "quant_block_size": 128,
}


def backend_classes():
    names = {
        "append_attn_backend": "AppendAttentionBackend",
        "flash_attn_backend": "FlashAttentionBackend",
        "flash_mask_attn_backend": "FlashMaskAttentionBackend",
        "moba_attention_backend": "PlasAttentionBackend",
        "block_multihead_attn_backend": "BlockAttentionBackend",
        "mla_attention_backend": "MLAAttentionBackend",
        "dsa_attention_backend": "DSAAttentionBackend",
    }
    if importlib.util.find_spec(f"{ATTENTION}.dsa_attention_backend") is None:
        del names["dsa_attention_backend"]
    return {name: getattr(importlib.import_module(f"{ATTENTION}.{module}"), name) for module, name in names.items()}


def make(backend_class):
    """Without the constructor, which asks for a GPU; with the attributes it would have set."""
    backend = object.__new__(backend_class)
    vars(backend).update(FIELDS)
    return backend


FLAT = ("AppendAttentionBackend", "FlashAttentionBackend", "FlashMaskAttentionBackend")
OTHERS = ("PlasAttentionBackend", "BlockAttentionBackend")
PAIR = [[3, 2, 4, 16]] * 2
LAYOUTS = [
    *(
        (name, quant_type, PAIR)
        for name in FLAT + OTHERS
        for quant_type in (None, "int8", "float8_e4m3fn", "int8_zp", "float8_e4m3fn_zp")
    ),
    *((name, "block_wise_fp8", PAIR + [[3, 2, 4]] * 2) for name in FLAT + OTHERS),
    ("AppendAttentionBackend", "int4_zp", [[3, 2, 4, 8]] * 2),
    ("MLAAttentionBackend", None, [[3, 1, 4, 576]]),
    ("DSAAttentionBackend", "uint8", [[3, 1, 4, 656], [3, 4, 132]]),
]
"""Backend, quantization, shapes of the tensors of a layer with 3 blocks."""


@pytest.mark.parametrize(("name", "quant_type", "shapes"), LAYOUTS)
def test_tensors_of_every_backend_and_quantization(name, quant_type, shapes):
    if name not in backend_classes():
        pytest.skip(f"this release has no {name}")
    tensors = make(backend_classes()[name]).create_kv_cache(3, 2, dtype="float32", quant_type=quant_type, device=4)
    assert [list(each.shape) for each in tensors.values()] == shapes * 2
    assert not any(tensor.numpy().any() for tensor in tensors.values())


def test_latent_attention_is_refused_with_scales():
    with pytest.raises(ValueError, match="block_wise_fp8"):
        make(backend_classes()["MLAAttentionBackend"]).create_kv_cache(
            3, 2, dtype="float32", quant_type="block_wise_fp8"
        )


class FakeOps(ModuleType):
    """Stands for the compiled custom ops: every name exists, none can be called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def no_op(*_args, **_kwargs):
            raise AssertionError(f"the FAKE custom op {name} was called")

        return no_op


def import_worker_modules():
    gpu = importlib.import_module("fastdeploy.model_executor.ops.gpu")
    gpu.__class__ = FakeOps
    for row in overlay.active().table.rows:
        importlib.import_module(row.module)
    runner = importlib.import_module("fastdeploy.worker.gpu_model_runner").GPUModelRunner
    proposer = importlib.import_module("fastdeploy.spec_decode.mtp").MTPProposer
    return runner, proposer


@pytest.fixture
def classes(monkeypatch):
    monkeypatch.setattr(paddle.device.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(worker_patches, "_current_gpu", CpuRuntime)
    return import_worker_modules()


def test_every_row_is_applied_to_the_real_classes(classes):
    overlay.active().require_complete(Where.WORKER)
    states = {row.target: state.name for row, state in overlay.active().states().items()}
    assert states == {row.target: "APPLIED" for row in overlay.active().table.rows}


def make_runner_and_proposer(runner_class, proposer_class):
    """With swap space and a draft model."""
    common = {
        "quant_config": None,
        "local_rank": 1,
        "device_id": 3,
        "parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "attn_backends": [make(backend_classes()["AppendAttentionBackend"])],
        "forward_meta": None,
    }
    runner = object.__new__(runner_class)
    vars(runner).update(
        common,
        num_gpu_blocks=6,
        model_config=SimpleNamespace(dtype="float32", num_hidden_layers=2),
        share_inputs={},
        cache_kvs_map={},
        cache_ready_signal=SimpleNamespace(value=[0, 0]),
    )
    proposer = object.__new__(proposer_class)
    vars(proposer).update(
        common,
        model_config=SimpleNamespace(dtype="float32", num_hidden_layers=1),
        speculative_config=SimpleNamespace(num_gpu_block_expand_ratio=1.5),
        num_main_model_layers=2,
        model_inputs={},
        cache_kvs_map={},
        _empty_cache=lambda: None,
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            num_cpu_blocks=5, block_size=4, enable_prefix_caching=True, kvcache_storage_backend=None
        ),
        speculative_config=SimpleNamespace(method="mtp", num_speculative_tokens=1),
        parallel_config=SimpleNamespace(local_engine_worker_queue_port=1, tensor_parallel_rank=0),
    )
    worker_patches.init_runner(lambda **_: None, None, (), {"fd_config": config})
    return runner, proposer


@pytest.mark.parametrize(("clearing", "num_tiers"), [("0", 1), ("1", 2)])
def test_the_runner_makes_and_drops_its_tensors_in_both_orders(classes, clearing, num_tiers, monkeypatch):
    """As at start and at a weight update. Host memory stays allocated unless FastDeploy is told to clear it."""
    monkeypatch.setenv("FD_ENABLE_SWAP_SPACE_CLEARING", clearing)
    allocate, sizes = CpuRuntime.allocate_host, []

    def counted(self, nbytes, *, shared):
        sizes.append(nbytes)
        return allocate(self, nbytes, shared=shared)

    monkeypatch.setattr(CpuRuntime, "allocate_host", counted)
    runner, proposer = make_runner_and_proposer(*classes)
    cache, signal = worker_patches.worker_cache(), runner.cache_ready_signal
    runner.initialize_kv_cache(profile=True)
    proposer.initialize_kv_cache(main_model_num_blocks=6, profile=True)
    proposer.clear_mtp_cache(profile=True)
    runner.clear_cache(profile=True)
    assert signal.value == [0, 0]
    assert not cache.has_host_tier
    names = [f"{kind}_caches_{layer}_rank1.device3" for layer in range(3) for kind in ("key", "value")]
    steps = [runner.initialize_kv_cache, lambda: proposer.initialize_kv_cache(main_model_num_blocks=6)]
    for in_order in (steps, reversed(steps)):
        for step in in_order:
            step()
        assert cache.has_host_tier
        assert signal.value == [0, 1]
        assert [*runner.cache_kvs_map, *proposer.cache_kvs_map] == names
        assert [list(each.shape) for each in runner.share_inputs["caches"]] == [[6, 2, 4, 16]] * 4
        assert [list(each.shape) for each in proposer.model_inputs["caches"]] == [[9, 2, 4, 16]] * 2
        proposer.clear_mtp_cache()
        runner.clear_cache()
        assert not cache.has_host_tier
        assert not runner.cache_kvs_map
        assert "caches" not in runner.share_inputs
    assert sizes == [5 * 3 * 2 * 2 * 4 * 16 * 4] * num_tiers
