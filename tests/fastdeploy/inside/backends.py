"""create_kv_cache on FastDeploy's real attention backends, and every worker row applied to the real classes, over FAKE
custom ops. No kernel is run. What runner and proposer make and drop: `worker/test_tensors_of_fastdeploy.py`.
"""

import importlib
import importlib.util

import pytest

import fastdeploy  # noqa: F401
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Where

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
    with pytest.raises(ValueError, match="caches no scales"):
        make(backend_classes()["MLAAttentionBackend"]).create_kv_cache(
            3, 2, dtype="float32", quant_type="block_wise_fp8"
        )


def fake_op(name):
    """Stands for a compiled custom op: every name exists, none can be called."""

    def no_op(*_args, **_kwargs):
        raise AssertionError(f"the FAKE custom op {name} was called")

    return no_op


def import_worker_modules():
    importlib.import_module("fastdeploy.model_executor.ops.gpu").__getattr__ = fake_op
    for row in overlay.active().table.rows:
        importlib.import_module(row.module)
    runner = importlib.import_module("fastdeploy.worker.gpu_model_runner").GPUModelRunner
    proposer = importlib.import_module("fastdeploy.spec_decode.mtp").MTPProposer
    return runner, proposer


def test_every_row_is_applied_to_the_real_classes():
    import_worker_modules()
    overlay.active().require_complete(Where.WORKER)
    states = {row.target: state.name for row, state in overlay.active().states().items()}
    assert states == {row.target: "APPLIED" for row in overlay.active().table.rows}
