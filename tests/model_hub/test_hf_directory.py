"""A little GGUF model becomes a directory that the server's own loaders take."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastdeploy_kvcache_v1.embedded.text.load_tokenizer import load_tokenizer
from fastdeploy_kvcache_v1.model.config import load_model_config
from fastdeploy_kvcache_v1.model.weights import load_weights
from fastdeploy_kvcache_v1.model_hub.gguf import GGUF
from fastdeploy_kvcache_v1.model_hub.hf_directory import write_hf_directory
from fastdeploy_kvcache_v1.model_hub.safetensors_file import write_safetensors

from .gguf_file import gguf_bytes, little_gguf, little_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("little")
    write_hf_directory(GGUF(little_gguf()), path)
    return path


def test_the_server_loads_it(directory):
    config = load_model_config(directory)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 4)
    assert (config.max_position, config.rms_norm_eps, config.tie_word_embeddings) == (256, 1e-5, True)
    weights = load_weights(directory, config)
    assert weights.lm_head is weights.embedding
    assert len(weights.layers) == 2


def test_every_tensor_arrives_under_its_name(directory):
    tensors, source = load_file(directory / "model.safetensors"), little_llama()[1]
    assert len(tensors) == len(source)
    moved = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for name, old in moved.items():
        np.testing.assert_array_equal(tensors[name], source[old])


@pytest.mark.parametrize(("name", "old", "heads"), [("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)])
def test_rows_that_are_rotated_together_move_half_a_head_apart(directory, name, old, heads):
    new = load_file(directory / "model.safetensors")[f"model.layers.0.self_attn.{name}.weight"]
    source = little_llama()[1][f"blk.0.{old}.weight"]
    head_dim = len(source) // heads
    for head in range(heads):
        for pair in range(head_dim // 2):
            for side in range(2):
                row = head * head_dim + side * head_dim // 2 + pair
                np.testing.assert_array_equal(new[row], source[head * head_dim + 2 * pair + side])


def test_a_separate_output_matrix_is_kept(tmp_path):
    metadata, arrays = little_llama()
    arrays["output.weight"] = arrays["token_embd.weight"] + 1
    write_hf_directory(
        GGUF(gguf_bytes(metadata, {name: (array.shape, 0, array.tobytes()) for name, array in arrays.items()})),
        tmp_path,
    )
    assert not load_model_config(tmp_path).tie_word_embeddings
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], arrays["output.weight"])


def test_tokenizer_merges_splits_digits_and_knows_its_special_tokens(directory):
    tokenizer = load_tokenizer(directory)
    tokens = little_llama()[0]["tokenizer.ggml.tokens"]
    assert [tokens[index] for index in tokenizer.encode("hello 42<|im_end|>")] == [
        *("hell", "o", "Ġ", "4", "2", "<|im_end|>"),
    ]
    assert tokenizer.decode(tokenizer.encode("hello père 😀")) == "hello père 😀"
    assert tokenizer.eos_token_ids == {2}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "he"}])
    assert [tokens[index] for index in ids] == ["<|im_start|>", "he", "<|im_end|>"]


def test_fastdeploy_finds_a_padding_token(directory):
    """It does not start without one, and reads all three files."""
    assert json.loads((directory / "config.json").read_text())["pad_token_id"] == 2
    assert json.loads((directory / "generation_config.json").read_text())["pad_token_id"] == 2
    assert json.loads((directory / "tokenizer_config.json").read_text())["pad_token"] == "<|im_end|>"


@pytest.mark.parametrize("letters", range(1, 9))
def test_the_data_of_a_weight_file_starts_aligned(tmp_path, letters):
    name, path = "x" * letters, tmp_path / "weights.safetensors"
    write_safetensors(path, {name: (2, 3)}, [np.arange(6, dtype=np.float32).reshape(2, 3)])
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    np.testing.assert_array_equal(load_file(path)[name], np.arange(6).reshape(2, 3))
