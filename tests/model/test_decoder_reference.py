"""The decoder against an independent float64 implementation, from directories as Hugging Face writes them."""

import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.model import decoder as decoder_module
from fastdeploy_kvcache_v1.model import layers, load_model_config
from fastdeploy_kvcache_v1.model.decoder import Decoder, SequenceSlice
from fastdeploy_kvcache_v1.model.rope import rope_tables

from .model_dirs import BASE, random_tensors, write_model
from .reference import reference_logits

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama": {},
    "llama-mha-bias-tied": {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
    "llama-head-dim": {"head_dim": 10, "rms_norm_eps": 1e-2},
    "llama-rope-llama3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0, "head_dim": 16},
    "llama-rope-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-rope-parameters": {"rope_theta": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 300.0}},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen2-sliding-window-off": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": 32,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": False},
    "qwen3-bias": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "attention_bias": True},
}


def new_caches(config, num_blocks=64, block_size=16, dtype="float32"):
    shape = [num_blocks, config.num_kv_heads, block_size, config.head_dim]
    return [paddle.zeros(shape, dtype=dtype) for _ in range(2 * config.num_layers)]


def every_logit(decoder, token_ids):
    """Logits after each token: a prefill of 140 tokens, which spans two key segments, then one by one."""
    caches, table = new_caches(decoder.config), list(range(63, 40, -1))
    first = 140
    logits = decoder.forward([SequenceSlice(token_ids[:first], 0, table)], caches)
    for position in range(first, len(token_ids)):
        logits += decoder.forward([SequenceSlice(token_ids[position : position + 1], position, table)], caches)
    return np.stack(logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_the_reference(variant, tmp_path):
    config = {key: value for key, value in (BASE | VARIANTS[variant]).items() if value is not None}
    tensors = random_tensors(config)
    path = write_model(tmp_path, tensors, config)
    decoder = Decoder.load(path, load_model_config(path))
    token_ids = np.random.default_rng(1).integers(0, config["vocab_size"], 150)

    computed = every_logit(decoder, token_ids)

    expected = reference_logits(config, tensors, token_ids)[139:]
    np.testing.assert_allclose(computed, expected, atol=2e-4, rtol=2e-4)
    assert computed.argmax(-1).tolist() == expected.argmax(-1).tolist()


FUSED = pytest.param(True, marks=pytest.mark.skipif(not layers.FUSED_NORM, reason="needs AVX-512"))


@pytest.mark.parametrize("fused", [FUSED, False])
def test_both_norms_match_the_reference(fused, monkeypatch):
    monkeypatch.setattr(layers, "FUSED_NORM", fused)
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((8, 20), np.float32), rng.standard_normal(20, np.float32)
    computed = layers.rms_norm(paddle.to_tensor(x), paddle.to_tensor(weight), 1e-2).numpy()
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-2) * weight
    np.testing.assert_allclose(computed, expected, rtol=1e-5)


@pytest.mark.parametrize("default", ["bfloat16", "float16"])
def test_paddles_default_dtype_changes_nothing(default):
    """FastDeploy sets it in its workers, before they load the model."""
    config = load_model_config(None)
    token_ids = np.arange(150)
    expected = every_logit(Decoder.load(None, config), token_ids)
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(default)
    try:
        assert np.array_equal(every_logit(Decoder.load(None, config), token_ids), expected)
    finally:
        paddle.set_default_dtype(before)


def test_position_tables_end_with_the_caches_whatever_the_model_says(tmp_path, monkeypatch):
    """Ten million positions are 6 GB of tables, and config.json may say anything."""
    made = []

    def tables(rope, head_dim, num_positions):
        made.append(num_positions)
        assert num_positions < 2000
        return rope_tables(rope, head_dim, num_positions)

    monkeypatch.setattr(decoder_module, "rope_tables", tables)
    config = BASE | {"max_position_embeddings": 10_000_000}
    tensors = random_tensors(config)
    path = write_model(tmp_path, tensors, config)
    decoder = Decoder.load(path, load_model_config(path))
    token_ids = np.random.default_rng(3).integers(0, 300, 40)
    for num_blocks in (3, 64, 64, 4):
        slice_ = SequenceSlice(token_ids, 0, [2, 1, 0])
        logits = decoder.forward([slice_], new_caches(decoder.config, num_blocks))[0]
        np.testing.assert_allclose(logits, reference_logits(config, tensors, token_ids)[-1], atol=2e-4, rtol=2e-4)
    padding = decoder.cut.align
    assert made == [0, 3 * 16 + padding, 64 * 16 + padding], "longer when the caches are, never shorter"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shards_and_stored_dtypes_load_alike(shards, dtype, tmp_path):
    tensors = {name: tensor.astype(dtype) for name, tensor in random_tensors(BASE).items()}
    path = write_model(tmp_path, tensors, BASE, shards=shards)
    token_ids = np.arange(20)
    decoder = Decoder.load(path, load_model_config(path))
    logits = decoder.forward([SequenceSlice(token_ids, 0, [1, 0])], new_caches(decoder.config))[0]
    np.testing.assert_allclose(logits, reference_logits(BASE, tensors, token_ids)[-1], atol=2e-4, rtol=2e-4)


def test_bfloat16_weights_are_converted_exactly(tmp_path):
    from safetensors.paddle import save_file

    tensors = {name: paddle.to_tensor(tensor).astype("bfloat16") for name, tensor in random_tensors(BASE).items()}
    path = write_model(tmp_path, {}, BASE)
    save_file(tensors, path / "model.safetensors")
    rounded = {name: tensor.astype("float32").numpy() for name, tensor in tensors.items()}
    decoder = Decoder.load(path, load_model_config(path))
    logits = decoder.forward([SequenceSlice(np.arange(9), 0, [0])], new_caches(decoder.config))[0]
    np.testing.assert_allclose(logits, reference_logits(BASE, rounded, np.arange(9))[-1], atol=2e-4, rtol=2e-4)


def test_random_model_is_reproducible_and_listens_to_its_context():
    config = load_model_config(None)
    token_ids = np.frombuffer(b"The random model has no file at all.", dtype=np.uint8).astype(np.int64)
    changed = token_ids.copy()
    changed[0] += 1

    def logits(decoder, ids):
        return decoder.forward([SequenceSlice(ids, 0, [0, 1, 2])], new_caches(config))[0]

    decoder = Decoder.load(None, config)
    assert np.array_equal(logits(decoder, token_ids), logits(Decoder.load(None, config), token_ids))
    assert np.abs(logits(decoder, token_ids) - logits(decoder, changed)).max() > 1e-3
