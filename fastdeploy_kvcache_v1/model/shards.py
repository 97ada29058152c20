"""How a model is split over tensor-parallel ranks, so that every bit stays what it is on one rank.

A rank projects, caches and attends with its own heads. What they give is gathered in rank order, which is head order,
and everything else (output projection, MLP, logits) every rank computes whole: no sum is cut in two, so none can be
added up in another order. What is left to the math library is that a head's numbers do not depend on how many other
heads are computed beside it, and that is tried out here before the model serves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from ..errors import ConfigError
from .attention import AttentionWeights, Projection, causal_mask
from .attention_families import family_of
from .config import ModelConfig
from .layers import attend
from .plan import FIXED_TILES, SEGMENT, RowCut
from .ranks import Ranks
from .row_probe import KEY_SEGMENTS, PIECES
from .tensors import as_array, step_tensor

__all__ = ["require_heads_stand_alone", "shard_weights"]

Tensor = Any


def shard_weights(weights: AttentionWeights, config: ModelConfig, ranks: Ranks) -> AttentionWeights:
    """The rank's part of a layer's attention `weights`; `config` is the whole model's."""
    if ranks.size == 1:
        return weights
    sharded: AttentionWeights = family_of(config).shard(weights, config, ranks.rank, ranks.size)
    return sharded


def require_heads_stand_alone(weights: AttentionWeights, config: ModelConfig, cut: RowCut, size: int) -> None:
    """Raises `ConfigError` if a head of one layer, computed with its rank's heads, differs from it among all heads.

    `weights` and `config` are whole. Takes a fraction of a second.
    """
    family, own = family_of(config), config.shard(size)
    whole = family.projection(weights, config)
    parts = [family.projection(family.shard(weights, config, rank, size), own) for rank in range(size)]
    sizes = (cut.linear,) if cut is FIXED_TILES else sorted(set(PIECES))
    with paddle.no_grad():
        alike = (_projects_alike(whole, parts, config, rows) and _attends_alike(config, size, rows) for rows in sizes)
        if not all(alike):
            raise ConfigError(
                "the math library of this machine computes a head otherwise when fewer are computed beside it, which "
                "would change tokens: leave out --tensor-parallel-size"
            )


def _normal(*shape: int) -> Tensor:
    return step_tensor(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))


def _projects_alike(whole: Projection, parts: list[Projection], config: ModelConfig, rows: int) -> bool:
    hidden = _normal(rows, config.hidden_size)
    expected, *expected_rest = whole(hidden)
    given = [part(hidden) for part in parts]
    queries = [_heads(each[0], config)[:, : config.num_heads // len(parts)] for each in given]
    others = [_heads(each[0], config)[:, config.num_heads // len(parts) :] for each in given]
    if config.latent is None:
        pairs = [np.split(each, 2, axis=1) for each in others]
        joined = [*queries, *(keys for keys, _ in pairs), *(values for _, values in pairs)]
    else:
        joined = [*queries, others[0]]  # what is whole on each rank
        if any(not _equal(each, others[0]) for each in others):
            return False
    rest = all(_equal(as_array(a), as_array(b)) for each in given for a, b in zip(each[1:], expected_rest, strict=True))
    return rest and _equal(np.concatenate(joined, axis=1), _heads(expected, config))


def _heads(rows: Tensor, config: ModelConfig) -> Any:
    return as_array(rows).reshape(len(rows), -1, config.head_dim)


def _attends_alike(config: ModelConfig, size: int, rows: int) -> bool:
    group = config.num_heads // config.num_kv_heads
    mask = causal_mask(np.array([SEGMENT - 1]), 1)
    # Latent attention has one cached head, and its query heads are rows; else whole cached heads go to the ranks.
    axis = 0 if config.latent is None else 1

    def alike(num_keys: int) -> bool:
        queries = _normal(config.num_kv_heads, group * rows, config.head_dim)
        keys = _normal(config.num_kv_heads, num_keys, config.head_dim)
        values = _normal(config.num_kv_heads, num_keys, config.value_dim)
        cached = [(keys, values)] * size
        if axis == 0:
            cached = list(zip(paddle.split(keys, size), paddle.split(values, size), strict=True))
        own = paddle.split(queries, size, axis)
        parts = [attend(part, *tensors, mask) for part, tensors in zip(own, cached, strict=True)]
        return _equal(as_array(paddle.concat(parts, axis)), as_array(attend(queries, keys, values, mask)))

    return all(alike(segments * SEGMENT) for segments in KEY_SEGMENTS)


def _equal(a: Any, b: Any) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))
