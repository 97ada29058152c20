"""Sparse attention: latent attention over the tokens that an indexer chooses, with both caches in fp8.

The indexer scores every earlier token, `sum over its heads of w * relu(q . k)`, and attention looks at the `topk`
best, of equal ones at the earliest. What it leaves out is masked, so the lengths of sums stay those of `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from .attention import BucketTensors, Projection, Rows
from .attention_mla import LatentAttention, MLAProjection, MLAWeights
from .attention_mla import read_weights as read_latent_weights
from .config import IndexerConfig, ModelConfig
from .layers import linear, rms_norm, weight_tensor
from .packed_cache import PackedCache
from .paged_cache import RowCache
from .plan import SEGMENT, BatchPlan
from .tensors import as_array, step_tensor
from .weight_source import Array, Source

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class DSAWeights(MLAWeights):
    """Those of latent attention, and the indexer's."""

    index: Array
    """`[(index heads + 1) * index head_dim, hidden]`: all queries, then the key."""
    index_norm: Array
    """`[index head_dim]`, of the key."""
    head_weights: Array
    """`[index heads, hidden]`"""


def indexer_of(config: ModelConfig) -> IndexerConfig:
    assert config.indexer is not None, "sparse attention serves a model without an indexer"
    return config.indexer


def read_weights(source: Source, prefix: str, config: ModelConfig) -> DSAWeights:
    """By the names of DeepSeek-V3.2; the indexer's queries come from the hidden states."""
    indexer, hidden = indexer_of(config), config.hidden_size
    latent = read_latent_weights(source, prefix, config)

    def read(name: str, *shape: int) -> Array:
        return source.read(f"{prefix}.self_attn.indexer.{name}.weight", shape)

    queries = read("wq", indexer.num_heads * indexer.head_dim, hidden)
    return DSAWeights(
        **vars(latent),
        index=np.concatenate([queries, read("wk", indexer.head_dim, hidden)]),
        index_norm=read("k_norm", indexer.head_dim),
        head_weights=read("weights_proj", indexer.num_heads, hidden),
    )


class DSAProjection(Projection):
    """What latent attention needs; the indexer's queries and key `[rows, heads + 1, head_dim]`; its heads' weights."""

    def __init__(self, weights: DSAWeights, config: ModelConfig) -> None:
        indexer = indexer_of(config)
        self._latent = MLAProjection(weights, config)
        self._split = [indexer.num_heads * indexer.head_dim, indexer.head_dim]
        self._shape = [-1, indexer.num_heads + 1, indexer.head_dim]
        self._epsilon = config.rms_norm_eps
        self._index = weight_tensor(weights.index)
        self._norm = weight_tensor(weights.index_norm)
        self._head_weights = weight_tensor(weights.head_weights)

    def __call__(self, hidden: Tensor) -> list[Tensor]:
        queries, keys = paddle.split(linear(hidden, self._index), self._split, axis=1)
        index = paddle.concat([queries, rms_norm(keys, self._norm, self._epsilon)], axis=1)
        return [*self._latent(hidden), index.reshape(self._shape), linear(hidden, self._head_weights)]


class SparseAttention(LatentAttention):
    """Caches: the packed latent vector, and the indexer's packed key."""

    def __init__(self, plan: BatchPlan, config: ModelConfig, cos: Array, sin: Array) -> None:
        super().__init__(plan, config, cos, sin)
        self._token_rows = plan.rows
        self._index_queries = self._head_weights = np.empty((0, 0, 0), dtype=np.float32)

    def write(self, projected: Rows, caches: Rows) -> Tensor:
        latent, index, head_weights = projected
        by_head = as_array(index)
        self._rotation.apply_(by_head)
        keys = step_tensor(by_head[self._token_rows, -1])
        self._index_cache(caches).write(self._cache_rows, keys)
        self._index_queries, self._head_weights = by_head[:, :-1], as_array(head_weights)
        return super().write([latent], caches)

    def latent_cache(self, caches: Rows) -> RowCache:
        return PackedCache(caches[0], num_quantized=self._config.value_dim)

    def _index_cache(self, caches: Rows) -> PackedCache:
        return PackedCache(caches[1], num_quantized=indexer_of(self._config).head_dim)

    def mask(self, bucket: BucketTensors, caches: Rows) -> NDArray[np.float32]:
        rows = slice(bucket.rows.start, bucket.rows.stop)
        queries = step_tensor(self._index_queries[rows].transpose(1, 0, 2))
        scores = index_scores(queries, self._index_cache(caches).read(bucket.cache_rows), self._head_weights[rows])
        scores[:, -SEGMENT:] += bucket.mask[: len(scores)]
        chosen = best_of(scores, indexer_of(self._config).topk)
        return np.tile(np.where(chosen, np.float32(0), np.float32(-np.inf)), (self._config.num_heads, 1))


def index_scores(queries: Tensor, keys: Tensor, head_weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[rows, n]` of queries `[heads, rows, dim]`, keys `[n, dim]` and weights `[rows, heads]`."""
    num_heads, num_rows, dim = queries.shape
    products = as_array(paddle.matmul(queries.reshape([-1, dim]), keys, transpose_y=True))
    by_head = np.maximum(products, 0).reshape(num_heads, num_rows, -1)
    total: NDArray[np.float32] = by_head[0] * head_weights[:, :1]
    for head in range(1, num_heads):
        total += by_head[head] * head_weights[:, head : head + 1]
    return total


def best_of(scores: NDArray[np.float32], count: int) -> NDArray[np.bool_]:
    """Per row, the `count` highest of the scores above -inf; of equal ones the first."""
    chosen = scores > -np.inf
    if chosen.sum(axis=1).max() > count:
        order = np.argsort(-scores, axis=1, kind="stable")
        best = np.zeros_like(chosen)
        np.put_along_axis(best, order[:, :count], True, axis=1)
        chosen &= best
    return chosen
