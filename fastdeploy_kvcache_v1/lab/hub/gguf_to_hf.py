"""Converts a Llama model from GGUF to a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in GGUF -> in Hugging Face's Llama, without `blk.N.` or `model.layers.N.` and `.weight`."""

HEADS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
"""Tensors whose rows GGUF keeps in another order -> the key of their number of heads."""

SPECIAL = 3
"""Token type of control tokens."""


def write_hf_directory(gguf: Path, directory: Path) -> None:
    """Fill the existing `directory`: configuration, weights in float32, byte-level BPE tokenizer, chat template.

    Holds all weights in memory. Raises `OSError` for trouble with the disk.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = dict(_weights(reader, fields))
    config = _config(fields, tied="lm_head.weight" not in weights)
    token_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", token_ids)
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(fields))
    (directory / "tokenizer.json").write_text(_tokenizer(fields).to_str(), encoding="utf-8")
    _write_weights(directory / "model.safetensors", weights)


def _weights(reader: GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for tensor in reader.tensors:
        *layer, name, ending = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if name in HEADS:
            weight = _rotary_halves(weight, fields[HEADS[name]])
        yield ".".join((*(("model.layers", layer[1]) if layer else ()), NAMES[name], ending)), weight


def _rotary_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Move rows that are rotated together from side by side, as in GGUF, to half a head apart."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
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
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        # FastDeploy does not start without one, here and in tokenizer_config.json.
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _shortest(number: float) -> float:
    """The shortest number for a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # `tokenizer.ggml.pre` smollm: single digits, then GPT-2's words.
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


def _write_weights(path: Path, weights: dict[str, NDArray[np.float32]]) -> None:
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its text names an error of the disk
        raise OSError(str(error)) from error
    # The library makes it readable by the owner only.
    path.chmod(path.with_name("config.json").stat().st_mode)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
