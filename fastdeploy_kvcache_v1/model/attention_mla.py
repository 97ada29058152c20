"""Multi-head latent attention, computed over the cached latent vectors themselves.

A head's key is `W_k c` and its value `W_v c` of the latent vector `c`, and `q . W_k c = (W_k^T q) . c`: `W_k` moves
into the query's projection and `W_v` into the output's. What is left is multi-query attention over one vector per
token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import paddle
from numpy.typing import NDArray

from .attention import AttentionWeights, BucketTensors, Projection, Rows, StepAttention
from .config import LatentConfig, ModelConfig
from .layers import attend, linear, rms_norm, weight_tensor
from .paged_cache import PagedCache, RowCache
from .plan import BatchPlan
from .tensors import as_array, step_tensor
from .weight_source import Array, Source

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class MLAWeights(AttentionWeights):
    """The up-projections of keys and values are part of `queries_latent` and `output`."""

    queries_latent: Array
    """`[(num_heads + 1) * head_dim, hidden]`: all queries, then the latent vector and its rotated part."""
    latent_norm: Array
    """`[rank]`"""


def read_weights(source: Source, prefix: str, config: ModelConfig) -> MLAWeights:
    """By the names of DeepSeek-V2, without the low-rank projection of queries."""
    latent, heads, hidden = latent_of(config), config.num_heads, config.hidden_size
    key_dim = latent.nope_dim + latent.rope_dim

    def read(name: str, *shape: int) -> Array:
        return source.read(f"{prefix}.self_attn.{name}.weight", shape)

    queries = read("q_proj", heads * key_dim, hidden).reshape(heads, key_dim, hidden)
    down = read("kv_a_proj_with_mqa", config.head_dim, hidden)
    norm = read("kv_a_layernorm", latent.rank)
    up = read("kv_b_proj", heads * (latent.nope_dim + latent.value_dim), latent.rank)
    up_keys, up_values = np.split(up.reshape(heads, -1, latent.rank), [latent.nope_dim], axis=1)
    output = read("o_proj", hidden, heads * latent.value_dim).reshape(hidden, heads, latent.value_dim)
    absorbed = _product("hnr,hnd->hrd", up_keys, queries[:, : latent.nope_dim])
    absorbed = np.concatenate([absorbed, queries[:, latent.nope_dim :]], axis=1) * np.float32(key_dim**-0.5)
    return MLAWeights(
        queries_latent=np.concatenate([absorbed.reshape(-1, hidden), down]),
        latent_norm=norm,
        output=_product("ohv,hvr->ohr", output, up_values).reshape(hidden, -1),
    )


LatentWeights = TypeVar("LatentWeights", bound=MLAWeights)


def shard_weights(weights: LatentWeights, config: ModelConfig, rank: int, size: int) -> LatentWeights:
    """Every rank has some of the query heads; the latent vector, and an indexer, are whole on each."""
    queries, down = np.split(weights.queries_latent, [config.num_heads * config.head_dim])
    return replace(weights, queries_latent=np.concatenate([np.split(queries, size)[rank], down]))


def latent_of(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None, "a family of latent attention serves a model without latent vectors"
    return config.latent


def _product(subscripts: str, left: Array, right: Array) -> Array:
    """In float64: the weights of a model are the same whatever library multiplies them."""
    product: Array = np.einsum(subscripts, left, right, dtype=np.float64).astype(np.float32)
    return product


class MLAProjection(Projection):
    """Queries, then the latent vector, normed, and what is rotated with it."""

    def __init__(self, weights: MLAWeights, config: ModelConfig) -> None:
        self._split = [config.num_heads * config.head_dim, config.value_dim, config.rope_dim]
        self._epsilon = config.rms_norm_eps
        self._weight = weight_tensor(weights.queries_latent)
        self._norm = weight_tensor(weights.latent_norm)

    def __call__(self, hidden: Tensor) -> list[Tensor]:
        queries, latent, rotated = paddle.split(linear(hidden, self._weight), self._split, axis=1)
        return [paddle.concat([queries, rms_norm(latent, self._norm, self._epsilon), rotated], axis=1)]


class LatentAttention(StepAttention):
    """One cached vector per token, whose first `rank` elements are also the value."""

    def __init__(self, plan: BatchPlan, config: ModelConfig, cos: Array, sin: Array) -> None:
        super().__init__(plan, config, cos, sin)
        self._key_rows = step_tensor(plan.key_rows)

    def write(self, projected: Rows, caches: Rows) -> Tensor:
        rows = projected[0]
        self._rotation.apply_(as_array(rows).reshape(len(rows), -1, self._config.head_dim))
        heads = rows.reshape([-1, self._config.head_dim])
        self.latent_cache(caches).write(self._cache_rows, paddle.gather(heads, self._key_rows))
        return paddle.gather(heads, self._query_rows)

    def attend_bucket(self, bucket: BucketTensors, queries: Tensor, caches: Rows) -> Tensor:
        keys = self.latent_cache(caches).read(bucket.cache_rows).unsqueeze(0)
        return attend(queries, keys, keys[:, :, : self._config.value_dim], self.mask(bucket, caches))

    def latent_cache(self, caches: Rows) -> RowCache:
        return PagedCache(caches[0])

    def mask(self, bucket: BucketTensors, caches: Rows) -> NDArray[np.float32]:
        """For `attend`."""
        return bucket.mask
