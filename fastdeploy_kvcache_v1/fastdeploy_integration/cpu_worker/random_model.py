"""A small model directory in Hugging Face's format, with random weights and a byte tokenizer: something to serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_random_model(directory: Path, *, seed: int = 0) -> Path:
    """All that FastDeploy and the worker read. The same seed gives the same bytes. Needs tokenizers, safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", CONFIG)
    _write_json(directory / "generation_config.json", {key: CONFIG[key] for key in ("eos_token_id", "pad_token_id")})
    _write_tokenizer(directory)
    write_random_weights(directory, seed=seed)
    return directory


def write_random_weights(directory: Path, *, seed: int) -> None:
    """Replace the weights, at once."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    temporary = directory / "model.safetensors.tmp"
    save_file({name: _draw(random, name, shape) for name, shape in _tensor_shapes().items()}, temporary)
    temporary.replace(directory / "model.safetensors")


def _draw(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if "norm" in name:
        return np.ones(shape, dtype=np.float32)
    # Sharp enough that a token depends on far ones: a wrong cache then shows in the text.
    gain = 1.0 if "embed" in name else (2.0 if "q_proj" in name or "k_proj" in name else 1.0) * shape[-1] ** -0.5
    return random.standard_normal(shape, dtype=np.float32) * np.float32(gain)


def _tensor_shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    heads = {"q": CONFIG["num_attention_heads"], "k": CONFIG["num_key_value_heads"], "v": CONFIG["num_key_value_heads"]}
    rows = {name: count * hidden // CONFIG["num_attention_heads"] for name, count in heads.items()}
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}_proj.weight": (count, hidden) for name, count in rows.items()},
        **{f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()},
        "self_attn.o_proj.weight": (hidden, rows["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    layers = range(CONFIG["num_hidden_layers"])
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
        **{f"model.layers.{index}.{name}": shape for index in layers for name, shape in layer.items()},
    }


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
