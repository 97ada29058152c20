"""A Llama model in GGUF as a Hugging Face directory: what the embedded server and FastDeploy load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .gguf import GGUF
from .safetensors_file import write_safetensors

OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Names of tensors in GGUF -> in Hugging Face's Llama. A model that lacks `output.weight` shares the embedding."""

IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""The same, after `blk.N.` and `model.layers.N.`."""

HEADS = {"attn_q.weight": "llama.attention.head_count", "attn_k.weight": "llama.attention.head_count_kv"}
"""Tensors whose rows GGUF keeps in another order, and how many heads they have."""

SPECIAL = 3
"""Token type of control tokens."""


def write_hf_directory(gguf: GGUF, directory: Path) -> None:
    """Fill the existing `directory`: configuration, weights in float32, byte-level BPE tokenizer, chat template.

    Holds one tensor at a time. Raises `OSError` for trouble with the disk.
    """
    config = _config(gguf)
    _write_json(directory / "config.json", config)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", tokens)
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(gguf.metadata))
    text = _tokenizer(gguf.metadata).to_str()
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    shapes = {name: gguf.shape(source) for source, name in _names(gguf)}
    tensors = (_tensor(gguf, source) for source, _ in _names(gguf))
    write_safetensors(directory / "model.safetensors", shapes, tensors)


def _config(gguf: GGUF) -> dict[str, Any]:
    fields = gguf.metadata
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in gguf,
        "torch_dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        # FastDeploy does not start without one, here and in tokenizer_config.json.
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _shortest(number: float) -> float:
    """The number that was meant by a float32: 1e-05 where the nearest double is 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _names(gguf: GGUF) -> Iterator[tuple[str, str]]:
    yield from ((source, name) for source, name in OUTSIDE_LAYERS.items() if source in gguf)
    for layer in range(gguf.metadata["llama.block_count"]):
        yield from ((f"blk.{layer}.{source}", f"model.layers.{layer}.{name}") for source, name in IN_LAYER.items())


def _tensor(gguf: GGUF, source: str) -> NDArray[np.float32]:
    tensor = gguf.read(source)
    heads = HEADS.get(".".join(source.split(".")[2:]))
    return tensor if heads is None else _rotary_halves(tensor, gguf.metadata[heads])


def _rotary_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """GGUF keeps the two rows that are rotated together side by side; here they are half a head apart."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # What `tokenizer.ggml.pre` calls smollm: single digits, then GPT-2's words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()},
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
