"""A random-weight Llama directory with as many layers as small real models have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NUM_LAYERS = 24
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 8, 4, 32

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 258,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

LAYER = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def write(path: Path) -> Path:
    """Config, weights and a byte-level tokenizer in `path`, the same every time."""
    rng = np.random.default_rng(0)
    ones = np.ones(HIDDEN, np.float32)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((258, HIDDEN), np.float32), "model.norm.weight": ones}
    for layer in range(NUM_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ones.copy()
        for name, shape in LAYER.items():
            weight = rng.standard_normal(shape, np.float32) * shape[1] ** -0.5
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={"<s>": 0, "</s>": 1} | {c: i for i, c in enumerate(alphabet, 2)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path
