"""Attention by heads: grouped queries, multi-head and multi-query attention, with or without a sliding window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle

from .attention import AttentionWeights, BucketTensors, Projection, Rows, StepAttention
from .config import ModelConfig
from .layers import attend, linear, rms_norm, weight_tensor
from .paged_cache import RowCache, head_caches
from .plan import BatchPlan
from .tensors import as_array, step_tensor
from .weight_source import Array, Source

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class GQAWeights(AttentionWeights):
    qkv: Array
    """`[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`: all queries, all keys, all values."""
    qkv_bias: Array | None
    qk_norm: Array | None
    """`[(num_heads + num_kv_heads) * head_dim]`: the query norm's weights for each query head, then the keys'."""


def read_weights(source: Source, prefix: str, config: ModelConfig) -> GQAWeights:
    """By the names of Llama, Qwen2 and Qwen3."""
    hidden = config.hidden_size
    rows = {"q": config.num_heads * config.head_dim, "k": config.num_kv_heads * config.head_dim}
    rows["v"] = rows["k"]

    def read(name: str, *shape: int) -> Array:
        return source.read(f"{prefix}.self_attn.{name}", shape)

    # The softmax scale rides on the queries: on their projection, or on their norm where one follows it.
    scale = np.float32(config.head_dim**-0.5)
    projection_scale = {"q": np.float32(1) if config.qk_norm else scale, "k": np.float32(1), "v": np.float32(1)}
    projections = [read(f"{p}_proj.weight", rows[p], hidden) * projection_scale[p] for p in "qkv"]
    qkv_bias = qk_norm = output_bias = None
    if config.qkv_bias:
        qkv_bias = np.concatenate([read(f"{p}_proj.bias", rows[p]) * projection_scale[p] for p in "qkv"])
    if config.qk_norm:
        query = read("q_norm.weight", config.head_dim) * scale
        key = read("k_norm.weight", config.head_dim)
        qk_norm = np.concatenate([np.tile(query, config.num_heads), np.tile(key, config.num_kv_heads)])
    if config.output_bias:
        output_bias = read("o_proj.bias", hidden)
    return GQAWeights(
        qkv=np.concatenate(projections),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        output=read("o_proj.weight", hidden, rows["q"]),
        output_bias=output_bias,
    )


def shard_weights(weights: GQAWeights, config: ModelConfig, rank: int, size: int) -> GQAWeights:
    """Every rank has some of the query heads, and the key-value heads that those share."""

    def own(rows: Array | None, *counts: int) -> Array | None:
        """The rank's share of each group of `counts` heads."""
        if rows is None:
            return None
        groups = np.split(rows, np.cumsum(np.array(counts[:-1], dtype=np.int64) * config.head_dim))
        return np.concatenate([np.split(group, size)[rank] for group in groups])

    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = own(weights.qkv, heads, kv_heads, kv_heads)
    assert qkv is not None
    return replace(
        weights,
        qkv=qkv,
        qkv_bias=own(weights.qkv_bias, heads, kv_heads, kv_heads),
        qk_norm=own(weights.qk_norm, heads, kv_heads),
    )


class GQAProjection(Projection):
    """Queries, keys and values."""

    def __init__(self, weights: GQAWeights, config: ModelConfig) -> None:
        self._config = config
        self._qkv = weight_tensor(weights.qkv)
        self._bias = weight_tensor(weights.qkv_bias)
        self._qk_norm = weight_tensor(weights.qk_norm)
        self._ones = paddle.ones([config.head_dim], dtype="float32")

    def __call__(self, hidden: Tensor) -> list[Tensor]:
        qkv = linear(hidden, self._qkv, self._bias)
        return [qkv if self._qk_norm is None else self._normalize_heads(qkv)]

    def _normalize_heads(self, qkv: Tensor) -> Tensor:
        config = self._config
        width = (config.num_heads + config.num_kv_heads) * config.head_dim
        qk, values = paddle.split(qkv, [width, qkv.shape[1] - width], axis=1)
        qk = rms_norm(qk.reshape([-1, config.head_dim]), self._ones, config.rms_norm_eps)
        return paddle.concat([qk.reshape([-1, width]) * self._qk_norm, values], axis=1)


class GroupedQueryAttention(StepAttention):
    """A key and a value per token and key-value head."""

    def __init__(self, plan: BatchPlan, config: ModelConfig, cos: Array, sin: Array) -> None:
        super().__init__(plan, config, cos, sin)
        self._key_rows = step_tensor(plan.key_rows)
        self._value_rows = step_tensor(plan.key_rows + config.num_kv_heads)

    def write(self, projected: Rows, caches: Rows) -> Tensor:
        (qkv,), config = projected, self._config
        by_head = as_array(qkv).reshape(len(qkv), -1, config.head_dim)
        self._rotation.apply_(by_head[:, : config.num_heads + config.num_kv_heads])
        heads = qkv.reshape([-1, config.head_dim])
        keys, values = self._caches(caches)
        keys.write(self._cache_rows, paddle.gather(heads, self._key_rows))
        values.write(self._cache_rows, paddle.gather(heads, self._value_rows))
        return paddle.gather(heads, self._query_rows)

    def attend_bucket(self, bucket: BucketTensors, queries: Tensor, caches: Rows) -> Tensor:
        shape = [self._config.num_kv_heads, -1, self._config.head_dim]
        keys, values = (cache.read(bucket.cache_rows).reshape(shape) for cache in self._caches(caches))
        return attend(queries, keys, values, bucket.mask)

    def _caches(self, tensors: Rows) -> tuple[RowCache, RowCache]:
        return head_caches(tensors)
