"""Llama, Qwen2 and Qwen3 once more: plain NumPy, float64, no cache, written from the models' definitions.

Takes the raw `config.json` content and the raw tensors, so that it shares no code with the package.
"""

import math

import numpy as np


def reference_logits(config: dict, tensors: dict, token_ids) -> np.ndarray:
    """Logits `[n, vocab]` after every token."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = weights["model.embed_tokens.weight"][np.asarray(token_ids)]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + _attention(config, own, _norm(x, own["input_layernorm.weight"], config))
        x = x + _mlp(own, _norm(x, own["post_attention_layernorm.weight"], config))
    tied = config.get("tie_word_embeddings", False)
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return _norm(x, weights["model.norm.weight"], config) @ head.T


def _linear(weights, name, x):
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(x, weight, config):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight


def _mlp(weights, x):
    gate = _linear(weights, "mlp.gate_proj", x)
    return _linear(weights, "mlp.down_proj", gate / (1 + np.exp(-gate)) * _linear(weights, "mlp.up_proj", x))


def _attention(config, weights, x):
    n = len(x)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    q = _linear(weights, "self_attn.q_proj", x).reshape(n, heads, dim)
    k = _linear(weights, "self_attn.k_proj", x).reshape(n, kv_heads, dim)
    v = _linear(weights, "self_attn.v_proj", x).reshape(n, kv_heads, dim)
    if "self_attn.q_norm.weight" in weights:
        q = _norm(q, weights["self_attn.q_norm.weight"], config)
        k = _norm(k, weights["self_attn.k_norm.weight"], config)
    frequencies = np.array([_frequency(config, 2 * i / dim) for i in range(dim // 2)])
    q, k = _rotate(q, frequencies), _rotate(k, frequencies)
    out = np.empty_like(q)
    for head in range(heads):
        kv = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, kv].T / math.sqrt(dim)
        scores[np.triu_indices(n, 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, kv]
    return _linear(weights, "self_attn.o_proj", out.reshape(n, heads * dim))


def _rotate(x, frequencies):
    """Each pair (i, i + dim / 2) is a complex number, turned by position * frequency."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(np.arange(len(x)), frequencies))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _frequency(config, exponent):
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    frequency = theta**-exponent
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        wavelength = 2 * math.pi / frequency
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if wavelength < original / high:
            return frequency
        if wavelength > original / low:
            return frequency / scaling["factor"]
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
    return frequency
