"""The attention families once more: plain NumPy, float64, all tokens at once, written from their definitions.

Caches are stood in for by rounding what is cached; fp8 and bfloat16 are paddle's own.
"""

import math

import numpy as np
import paddle


def reference_logits(config, tensors, token_ids, *, quantized=False):
    """Logits `[n, vocab]` after every token. `quantized`: keys and values are cached in fp8."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    attention = {"gqa": heads, "mla": latent, "dsa": sparse}[config.attention_family]
    x = weights["model.embed_tokens.weight"][np.asarray(token_ids)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        hidden = norm(x, config)
        x = x + attention(config, {k.removeprefix("self_attn."): v for k, v in own.items()}, hidden, quantized)
        hidden = norm(x, config)
        gate = hidden @ own["mlp.gate_proj.weight"].T
        up = hidden @ own["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, config) @ weights["lm_head.weight"].T


def heads(config, weights, x, quantized):
    n, dim = len(x), config.head_dim
    q, k, v = ((x @ weights[f"{p}_proj.weight"].T).reshape(n, -1, dim) for p in "qkv")
    q, k = rotate(q), rotate(k)
    if quantized:
        k, v = (fp8_rows(each.reshape(-1, dim), dim).reshape(each.shape) for each in (k, v))
    allowed = np.tril(np.ones((n, n), bool))
    if config.sliding_window is not None:
        allowed &= ~np.tril(np.ones((n, n), bool), -config.sliding_window)
    group = config.num_heads // config.num_kv_heads
    parts = [
        softmax(q[:, h] @ k[:, h // group].T / math.sqrt(dim), allowed) @ v[:, h // group]
        for h in range(config.num_heads)
    ]
    return np.concatenate(parts, axis=1) @ weights["o_proj.weight"].T


def latent(config, weights, x, quantized, choose=None):
    """Keys and values of every head are made from the latent vectors: nothing is absorbed."""
    sizes, n = config.latent, len(x)
    q = (x @ weights["q_proj.weight"].T).reshape(n, config.num_heads, -1)
    down = x @ weights["kv_a_proj_with_mqa.weight"].T
    c, shared = norm(down[:, : sizes.rank], config), rotate(down[:, None, sizes.rank :])[:, 0]
    if choose is not None:
        c, shared = fp8_rows(c, 128), rounded(shared, "bfloat16")
    up = (c @ weights["kv_b_proj.weight"].T).reshape(n, config.num_heads, -1)
    allowed = np.tril(np.ones((n, n), bool)) if choose is None else choose
    parts = []
    for h in range(config.num_heads):
        plain, turned = q[:, h, : sizes.nope_dim], rotate(q[:, h : h + 1, sizes.nope_dim :])[:, 0]
        scores = plain @ up[:, h, : sizes.nope_dim].T + turned @ shared.T
        scale = math.sqrt(sizes.nope_dim + sizes.rope_dim)
        parts.append(softmax(scores / scale, allowed) @ up[:, h, sizes.nope_dim :])
    return np.concatenate(parts, axis=1) @ weights["o_proj.weight"].T


def sparse(config, weights, x, quantized):
    """Of the tokens up to its own, each looks at those with the highest scores."""
    indexer, n = config.indexer, len(x)
    q = (x @ weights["indexer.wq.weight"].T).reshape(n, indexer.num_heads, -1)
    k = norm(x @ weights["indexer.wk.weight"].T, config)
    q, k = (turn_end(each, config.latent.rope_dim) for each in (q, k[:, None]))
    k = fp8_rows(k[:, 0], 128)
    scores = np.einsum("nh,nhm->nm", x @ weights["indexer.weights_proj.weight"].T, np.maximum(q @ k.T, 0))
    choose = np.zeros((n, n), bool)
    for row in range(n):
        best = sorted(range(row + 1), key=lambda key: -scores[row, key])[: indexer.topk]
        choose[row, best] = True
    return latent(config, weights, x, quantized, choose)


def norm(x, config):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)


def softmax(scores, allowed):
    scores = np.where(allowed, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def rotate(x):
    """Each pair (i, i + dim / 2) of `[n, heads, dim]` is a complex number, turned by position * frequency."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), 10000.0 ** (-np.arange(half) / half))[:, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def turn_end(x, dim):
    return np.concatenate([x[..., :-dim], rotate(x[..., -dim:])], axis=-1)


def rounded(x, dtype):
    return paddle.to_tensor(x.astype(np.float32)).astype(dtype).astype("float32").numpy().astype(np.float64)


def fp8_rows(x, width):
    """Every `width` elements of a row share a scale."""
    pieces = x.reshape(len(x), -1, width)
    scales = (np.abs(pieces).max(-1, keepdims=True) / 448).astype(np.float32).astype(np.float64)
    return (rounded(pieces / scales, "float8_e4m3fn") * scales).reshape(x.shape)
