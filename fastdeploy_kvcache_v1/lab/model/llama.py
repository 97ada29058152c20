"""Llama, Qwen2 and Qwen3 in float32 over a paged KV cache, batch-invariant to the last bit.

The logits and the KV of a token depend on the tokens before it alone. Batch, chunks, prefill or decode, and the source
of its prefix's KV change no bit. `plan` explains why.

Rule: operations whose rounding depends on the shape (matrix products, reductions, exp) get whole rows. The math library
computes a row alike beside any other rows, see `reproducible`. Only copies and elementwise operations that IEEE 754
rounds exactly run on any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray

from .config import LlamaConfig, RopeConfig
from .plan import BatchPlan, Bucket
from .step import Logits, SequenceSlice
from .tensors import as_array, step_tensor
from .weights import Checkpoint

__all__ = ["Llama"]

Tensor = Any
"""paddle.Tensor; paddle is untyped here."""

Array = NDArray[np.float32]

ROWS = 256
"""Rows computed together: more would leave the L2 cache."""


class Llama:
    """Weights on the CPU. Keeps no sequence between calls, which must not overlap. `StepRunner` runs it.

    Call `configure_reproducible_math` before the first import of this module.
    """

    def __init__(self, weights: Checkpoint, config: LlamaConfig) -> None:
        """Raises `ModelError` for a missing, misshapen or unreadable tensor."""
        paddle.set_device("cpu")
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self._embedding = _tensor(weights.read("model.embed_tokens.weight", table))
        self._layers = [_Layer(weights, f"model.layers.{index}", config) for index in range(config.num_layers)]
        self._final_norm = _tensor(weights.read("model.norm.weight", (config.hidden_size,)))
        tied = config.tie_word_embeddings
        self._lm_head = self._embedding if tied else _tensor(weights.read("lm_head.weight", table))
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, 0)

    guess = None

    @classmethod
    def load(cls, path: Path, config: LlamaConfig) -> Llama:
        """Load a model directory. Raises like the constructor."""
        return cls(Checkpoint(path), config)

    def forward(
        self,
        sequences: Sequence[SequenceSlice],
        caches: Sequence[Tensor],
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> list[Logits]:
        """See `step_runner.Model`. `caches`: keys and values, layer by layer."""
        if len(caches) != 2 * len(self._layers):
            raise ValueError(f"{len(self._layers)} layers need {2 * len(self._layers)} caches, got {len(caches)}")
        if not sequences:
            return []
        num_blocks, _, block_size, _ = caches[0].shape
        plan = BatchPlan.build(sequences, self.config, num_blocks=num_blocks, block_size=block_size)
        self._extend_rope_tables(num_blocks * block_size)
        with paddle.no_grad():
            hidden = self._run_layers(plan, caches, before_layer)
            logits = self._logits(hidden, plan.last_rows)
        ends = np.cumsum([each.num_logits for each in sequences])[:-1]
        return np.split(logits, ends)

    def _run_layers(self, plan: BatchPlan, caches: Sequence[Tensor], before_layer: Callable[[int], None]) -> Tensor:
        """The hidden states `[rows, hidden]` after all layers."""
        attention = _Attention(plan, self.config, self._cos[plan.positions], self._sin[plan.positions])
        pieces = _split(paddle.gather(self._embedding, step_tensor(plan.token_ids)))
        for index, layer in enumerate(self._layers):
            keys, values = (cache.view([-1, cache.shape[3]]) for cache in caches[2 * index : 2 * index + 2])
            queries = attention.write(_join([layer.project(piece) for piece in pieces]), keys, values)
            before_layer(index)
            attended = _split(attention.attend(queries, keys, values))
            pieces = [layer.finish(*piece) for piece in zip(pieces, attended, strict=True)]
        return _join(pieces)

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Logits:
        """`[len(rows), vocab]`"""
        computed = [np.empty((0, self.config.vocab_size), np.float32)]
        for start in range(0, len(rows), ROWS):
            picked = paddle.gather(hidden, step_tensor(np.array(rows[start : start + ROWS])))
            normed = rms_norm(picked, self._final_norm, self.config.rms_norm_eps)
            computed.append(_linear(normed, self._lm_head).numpy())
        return np.concatenate(computed)

    def _extend_rope_tables(self, num_slots: int) -> None:
        """Extend to the positions that `num_slots` cached tokens need. The model's own limit may be far larger."""
        num_positions = min(self.config.max_position, num_slots)
        if len(self._cos) < num_positions:
            self._cos, self._sin = rope_tables(self.config.rope, self.config.head_dim, num_positions)


class _Layer:
    """The weights of one layer, and what it computes before and after attention.

    Linear weights are `[out, in]`, as stored: products of few rows are faster. The queries' projection, or their norm,
    has the softmax scale.
    """

    def __init__(self, weights: Checkpoint, prefix: str, config: LlamaConfig) -> None:
        self._config = config
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        rows = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
        scale = np.float32(dim**-0.5)
        scales = {"q": np.float32(1) if config.qk_norm else scale, "k": np.float32(1), "v": np.float32(1)}

        def read(name: str, *shape: int) -> Array:
            return weights.read(f"{prefix}.{name}", shape)

        self._input_norm = _tensor(read("input_layernorm.weight", hidden))
        qkv = [read(f"self_attn.{name}_proj.weight", rows[name], hidden) * scales[name] for name in "qkv"]
        self._qkv = _tensor(np.concatenate(qkv))
        self._qkv_bias = self._qk_norm = None
        if config.qkv_bias:
            biases = [read(f"self_attn.{name}_proj.bias", rows[name]) * scales[name] for name in "qkv"]
            self._qkv_bias = _tensor(np.concatenate(biases))
        if config.qk_norm:
            query, key = read("self_attn.q_norm.weight", dim) * scale, read("self_attn.k_norm.weight", dim)
            norms = [np.tile(query, config.num_heads), np.tile(key, config.num_kv_heads)]
            self._qk_norm, self._ones = _tensor(np.concatenate(norms)), paddle.ones([dim], dtype="float32")
        self._output = _tensor(read("self_attn.o_proj.weight", hidden, rows["q"]))
        self._mlp_norm = _tensor(read("post_attention_layernorm.weight", hidden))
        self._gate, self._up = (_tensor(read(f"mlp.{name}_proj.weight", inner, hidden)) for name in ("gate", "up"))
        self._down = _tensor(read("mlp.down_proj.weight", hidden, inner))

    def project(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` -> `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`: queries, keys, values."""
        qkv = _linear(rms_norm(x, self._input_norm, self._config.rms_norm_eps), self._qkv, self._qkv_bias)
        return qkv if self._qk_norm is None else self._normalize_heads(qkv)

    def _normalize_heads(self, qkv: Tensor) -> Tensor:
        config = self._config
        width = (config.num_heads + config.num_kv_heads) * config.head_dim
        qk, values = paddle.split(qkv, [width, qkv.shape[1] - width], axis=1)
        qk = rms_norm(qk.reshape([-1, config.head_dim]), self._ones, config.rms_norm_eps)
        return paddle.concat([qk.reshape([-1, width]) * self._qk_norm, values], axis=1)

    def finish(self, x: Tensor, attention: Tensor) -> Tensor:
        """What follows attention `[rows, num_heads * head_dim]`: its output projection, then the MLP."""
        x = x + _linear(attention, self._output)
        hidden = rms_norm(x, self._mlp_norm, self._config.rms_norm_eps)
        return x + _linear(F.silu(_linear(hidden, self._gate)) * _linear(hidden, self._up), self._down)


class _Attention:
    """Attention of one forward pass, used by each layer in turn: `write`, then `attend`.

    `keys` and `values` of a layer's cache are `[num_blocks * num_kv_heads * block_size, head_dim]`.
    """

    def __init__(self, plan: BatchPlan, config: LlamaConfig, cos: Array, sin: Array) -> None:
        """`cos` and `sin`: `[rows, head_dim // 2]`."""
        self._config = config
        self._cos, self._sin = cos[:, None], sin[:, None]
        self._num_rows = len(plan.positions)
        self._cache_rows = step_tensor(plan.cache_rows)
        self._key_rows = step_tensor(plan.key_rows)
        self._value_rows = step_tensor(plan.key_rows + config.num_kv_heads)
        self._query_rows = step_tensor(plan.query_rows)
        self._attention_rows = step_tensor(plan.attention_rows)
        group = config.num_heads // config.num_kv_heads
        self._buckets = [(each, step_tensor(each.cache_rows), each.mask(group)) for each in plan.buckets]

    def write(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store the new tokens. Returns the queries, by `plan.query_rows`. Changes `qkv`."""
        config = self._config
        by_head = as_array(qkv).reshape(len(qkv), -1, config.head_dim)
        self._rotate(by_head[:, : config.num_heads + config.num_kv_heads])
        heads = qkv.reshape([-1, config.head_dim])
        paddle.scatter_(keys, self._cache_rows, paddle.gather(heads, self._key_rows))
        paddle.scatter_(values, self._cache_rows, paddle.gather(heads, self._value_rows))
        return paddle.gather(heads, self._query_rows)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`[rows, num_heads * head_dim]`. The first read of the cache."""
        parts = [self._attend_bucket(*bucket, queries, keys, values) for bucket in self._buckets]
        return paddle.gather(_join(parts), self._attention_rows).reshape([self._num_rows, -1])

    def _attend_bucket(
        self, bucket: Bucket, cache_rows: Tensor, mask: Array, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """`[num_heads * rows, head_dim]`"""
        config = self._config
        shape = [config.num_kv_heads, -1, config.head_dim]
        own = queries[bucket.rows.start * config.num_heads : bucket.rows.stop * config.num_heads].reshape(shape)
        seen, content = (paddle.gather(each, cache_rows).reshape(shape) for each in (keys, values))
        scores = paddle.matmul(own, seen, transpose_y=True)
        as_array(scores)[:, :, -mask.shape[1] :] += mask
        # A masked key adds 0 * its value, and whether that is +0 or -0 depends on what the key is: the last addition
        # turns a sum of -0 into +0.
        return (paddle.matmul(F.softmax(scores), content) + 0.0).reshape([-1, config.head_dim])

    def _rotate(self, heads: Array) -> None:
        """Rotary embedding of every head of `[rows, heads, head_dim]`, in place."""
        half = self._cos.shape[2]
        first, second = heads[:, :, :half], heads[:, :, half:]
        turned = first * self._cos - second * self._sin
        second *= self._cos
        second += first * self._sin
        first[...] = turned


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalize over the last axis of `[rows, n]`.

    In NumPy: paddle's rsqrt rounds the last elements of a vector differently and broadcasts slowly. Its fused kernel
    kills the process on a processor without AVX-512.
    """
    result = paddle.empty(x.shape, dtype=x.dtype)  # FastDeploy sets another default
    rows, out = as_array(x), as_array(result)
    square_mean = np.einsum("ij,ij->i", rows, rows) / np.float32(rows.shape[1])
    np.multiply(rows, (1 / np.sqrt(square_mean + np.float32(epsilon)))[:, None], out=out)
    out *= as_array(weight)
    return result


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Array, Array]:
    """`(cos, sin)` of the angles, each float32 `[num_positions, head_dim // 2]`."""
    frequencies = rope.rope_theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "llama3":
        # Llama 3.1 keeps the fast pairs, slows the slow ones down by `factor`, and blends in between, where the
        # measure is how often a pair turns within the original context length.
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        frequencies = (1 - blend) * frequencies / rope.factor + blend * frequencies
    angles = np.outer(np.arange(num_positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = paddle.matmul(x, weight, transpose_y=True)
    return product if bias is None else product + bias


def _tensor(array: Array) -> Tensor:
    return paddle.to_tensor(np.ascontiguousarray(array))


def _split(rows: Tensor) -> list[Tensor]:
    """Split rows into groups that are computed together."""
    return [rows[start : start + ROWS] for start in range(0, rows.shape[0], ROWS)]


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else paddle.concat(pieces)
