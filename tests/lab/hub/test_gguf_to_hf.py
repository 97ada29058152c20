"""A little GGUF model becomes a directory that the server's own loaders take."""

import json

import numpy as np
import pytest
from gguf import dequantize, quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer as RustTokenizer

from fastdeploy_kvcache_v1.lab.hub.gguf_to_hf import write_hf_directory
from fastdeploy_kvcache_v1.lab.model.config import load_model_config
from fastdeploy_kvcache_v1.lab.model.llama import Llama
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer

from .little_model import QUANTIZED, SPECIAL, TOKENS, little_tensors, write_gguf


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("little")
    write_hf_directory(write_gguf(path / "little.gguf"), path)
    return path


def test_the_server_loads_it(directory):
    config = load_model_config(directory)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 8, 4, 4)
    assert (config.max_position, config.rms_norm_eps, config.tie_word_embeddings) == (256, 1e-5, True)
    Llama.load(directory, config)  # every tensor has its name and shape


def test_every_tensor_arrives_under_its_name(directory):
    tensors, source = load_file(directory / "model.safetensors"), little_tensors()
    assert len(tensors) == len(source)
    embedding = dequantize(quantize(source["token_embd.weight"], QUANTIZED), QUANTIZED)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], embedding)
    moved = {
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


@pytest.mark.parametrize(("name", "old", "heads"), [("q_proj", "attn_q", 8), ("k_proj", "attn_k", 4)])
def test_rows_that_are_rotated_together_move_half_a_head_apart(directory, name, old, heads):
    new = load_file(directory / "model.safetensors")[f"model.layers.0.self_attn.{name}.weight"]
    source = little_tensors()[f"blk.0.{old}.weight"]
    head_dim = len(source) // heads
    for head in range(heads):
        for pair in range(head_dim // 2):
            for side in range(2):
                row = head * head_dim + side * head_dim // 2 + pair
                np.testing.assert_array_equal(new[row], source[head * head_dim + 2 * pair + side])


def test_a_separate_output_matrix_is_kept(tmp_path):
    tensors = little_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    write_hf_directory(write_gguf(tmp_path / "little.gguf", tensors), tmp_path)
    assert not load_model_config(tmp_path).tie_word_embeddings
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], tensors["output.weight"])


def test_tokenizer_merges_splits_digits_and_knows_its_special_tokens(directory):
    tokenizer = load_tokenizer(directory)
    assert [TOKENS[index] for index in tokenizer.encode("hello 42<|im_end|>")] == [
        *("hell", "o", "Ġ", "4", "2", "<|im_end|>")
    ]
    assert tokenizer.decode(tokenizer.encode("hello père 😀")) == "hello père 😀"
    added = RustTokenizer.from_file(str(directory / "tokenizer.json")).get_added_tokens_decoder().values()
    assert [each.content for each in added if each.special and not each.normalized] == SPECIAL
    assert json.loads((directory / "tokenizer_config.json").read_text())["clean_up_tokenization_spaces"] is False
    assert tokenizer.eos_token_ids == {2}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "he"}])
    assert [TOKENS[index] for index in ids] == ["<|im_start|>", "he", "<|im_end|>"]


def test_fastdeploy_finds_a_padding_token(directory):
    """It does not start without one, and reads all three files."""
    assert json.loads((directory / "config.json").read_text())["pad_token_id"] == 2
    assert json.loads((directory / "generation_config.json").read_text())["pad_token_id"] == 2
    assert json.loads((directory / "tokenizer_config.json").read_text())["pad_token"] == "<|im_end|>"


def test_who_may_read_the_configuration_may_read_the_weights(directory):
    modes = {path.stat().st_mode for path in directory.glob("*.[js][sa]*")}
    assert len(modes) == 1


def test_weights_that_cannot_be_written_are_an_error_of_the_disk(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"model\.safetensors|[Dd]irectory"):
        write_hf_directory(write_gguf(tmp_path / "little.gguf"), tmp_path)
