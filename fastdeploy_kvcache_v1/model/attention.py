"""What an attention family adds to the decoder: its weights, its projection, its way through the cache.

A family is one file: a reader of weights, a `Projection` for each layer, and a `StepAttention` for each forward pass.
Its line is in `attention_families`. The cache's tensors are those of its layout in `fastdeploy_kvcache_v1.attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import paddle
from numpy.typing import NDArray

from .config import ModelConfig
from .plan import SEGMENT, BatchPlan, Bucket
from .tensors import step_tensor
from .weight_source import Array, Source

Tensor = Any
Rows = Sequence[Tensor]
"""What a projection gives, `[rows, ...]` each."""


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """What every family has. Queries are scaled for the softmax already."""

    output: Array
    """`[hidden, num_heads * value_dim]`"""
    output_bias: Array | None = None


class Projection(ABC):
    """One layer's way from hidden states to what attention needs."""

    @abstractmethod
    def __call__(self, hidden: Tensor) -> list[Tensor]:
        """Normed `[rows, hidden]` -> tensors of as many rows; the first is `[rows, heads_per_row * head_dim]`."""


class StepAttention(ABC):
    """Attention of one forward pass, made once and used by one layer after the other: `write`, then `attend`."""

    def __init__(self, plan: BatchPlan, config: ModelConfig, cos: Array, sin: Array) -> None:
        """`cos` and `sin`: `[rows, rope_dim // 2]`."""
        self._config = config
        self._rotation = Rotation(cos, sin)
        self._cache_rows = step_tensor(plan.cache_rows)
        self._query_rows = step_tensor(plan.query_rows)
        self._attention_rows = step_tensor(plan.attention_rows)
        self._num_rows = len(plan.positions)
        self._buckets = [BucketTensors(bucket, config) for bucket in plan.buckets]

    @abstractmethod
    def write(self, projected: Rows, caches: Rows) -> Tensor:
        """Store the new tokens in the layer's `caches`, one tensor per role. Returns the queries, by `plan.query_rows`.

        `projected` may be changed in place.
        """

    @abstractmethod
    def attend_bucket(self, bucket: BucketTensors, queries: Tensor, caches: Rows) -> Tensor:
        """`queries` and result: `[num_kv_heads, group * rows, head_dim]`, the result's last axis `value_dim`."""

    def attend(self, queries: Tensor, caches: Rows) -> Tensor:
        """`[rows, num_heads * value_dim]`. Only now is anything of `caches` read."""
        config = self._config
        shape = [config.num_kv_heads, -1, config.head_dim]
        parts = [
            self.attend_bucket(bucket, queries[bucket.queries].reshape(shape), caches).reshape([-1, config.value_dim])
            for bucket in self._buckets
        ]
        joined = parts[0] if len(parts) == 1 else paddle.concat(parts)
        return paddle.gather(joined, self._attention_rows).reshape([self._num_rows, -1])


class BucketTensors:
    """A bucket's indices as tensors, made once and used by every layer."""

    def __init__(self, bucket: Bucket, config: ModelConfig) -> None:
        self.rows = bucket.rows
        self.queries = slice(bucket.rows.start * config.num_heads, bucket.rows.stop * config.num_heads)
        self.cache_rows = step_tensor(bucket.cache_rows)
        self.mask = bucket_mask(bucket, config)


class Rotation:
    """Rotary embedding of all rows of a batch at once, made once per forward pass."""

    def __init__(self, cos: Array, sin: Array) -> None:
        """Each `[rows, rope_dim // 2]` as made by `rope.rope_tables`."""
        self._cos, self._sin = cos[:, None], sin[:, None]

    def apply_(self, heads: NDArray[np.float32]) -> None:
        """Turns the last `rope_dim` elements of every head of `[rows, heads, head_dim]` in place."""
        half = self._cos.shape[2]
        first, second = heads[:, :, -2 * half : -half], heads[:, :, -half:]
        turned = first * self._cos - second * self._sin
        second *= self._cos
        second += first * self._sin
        first[...] = turned


def bucket_mask(bucket: Bucket, config: ModelConfig) -> NDArray[np.float32]:
    """`[group * rows, keys]`: 0 where a row looks at a key, else -inf; for the bucket's last keys, as many as needed.

    That is `SEGMENT`, or with a sliding window all.
    """
    group = config.num_heads // config.num_kv_heads
    positions = bucket.first + np.arange(len(bucket.rows))
    if config.sliding_window is None:
        return causal_mask(positions, group)
    keys = np.arange(SEGMENT - len(bucket.cache_rows) // config.num_kv_heads, SEGMENT)
    behind = keys <= np.tile(positions, group)[:, None] - config.sliding_window
    mask = np.zeros(behind.shape, dtype=np.float32)
    mask[:, -SEGMENT:] = causal_mask(positions, group)
    mask[behind] = -np.inf
    return mask


def causal_mask(positions: NDArray[np.int64], group: int) -> NDArray[np.float32]:
    """`[group * rows, SEGMENT]`: 0 where the row at place `positions[i]` of a segment looks at a key of it."""
    return np.where(np.arange(SEGMENT) <= np.tile(positions, group)[:, None], np.float32(0), np.float32(-np.inf))


Weights = TypeVar("Weights", bound=AttentionWeights)


@dataclass(frozen=True)
class Family(Generic[Weights]):
    """One row of `attention_families`."""

    num_roles: tuple[int, ...]
    """Cache tensors that a layer may have."""
    read: Callable[[Source, str, ModelConfig], Weights]
    """Weights of the layer whose tensors have this prefix."""
    projection: Callable[[Weights, ModelConfig], Projection]
    attention: Callable[[BatchPlan, ModelConfig, NDArray[np.float32], NDArray[np.float32]], StepAttention]
    shard: Callable[[Weights, ModelConfig, int, int], Weights]
    """`shard(weights, config, rank, size)`: what a tensor-parallel rank projects with, of the whole model's weights and
    configuration. The output projection stays whole, see `shards`.
    """
