"""Finds out whether the math library computes a row alike whatever other rows it computes at the same time.

MKL in its strict mode promises the same bits for any number of threads, and threads are given any number of rows. But
nothing says so for the modes of other processors and other libraries, and a wrong guess would change tokens without
a sign. So each product that the model needs is computed twice, all rows at once and in pieces, and compared bit for
bit: two orders of summing hundreds of random numbers do not agree in thousands of results by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from .attention import causal_mask
from .attention_dsa import index_scores
from .config import ModelConfig
from .layers import DecoderLayer, attend, linear
from .plan import SEGMENT
from .tensors import as_array, step_tensor

Tensor = Any

VECTOR = 16
"""Floats in the widest register: the last elements of a row that it does not divide may get another `exp`."""

PIECES = (1, 2, 3, 4, 5, 6, 7, 8, 1, 16, 17, 31, 1, 61)
"""Rows computed together the second time."""

KEY_SEGMENTS = (1, 2, 9)
"""Lengths of the keys tried."""


def rows_stand_alone(layer: DecoderLayer, lm_head: Tensor, config: ModelConfig) -> bool:
    """For the shapes of this model, `lm_head` `[vocab, hidden]` included. Takes a fraction of a second."""
    if config.intermediate_size % VECTOR:
        return False
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Tensor:
        return step_tensor(random.standard_normal(shape, dtype=np.float32))

    num_rows = sum(PIECES)
    x, attention = normal(num_rows, config.hidden_size), normal(num_rows, config.num_heads * config.value_dim)
    group = config.num_heads // config.num_kv_heads
    queries = normal(config.num_kv_heads, group * num_rows, config.head_dim)

    def attends_alike(num_keys: int) -> bool:
        keys, values = (normal(config.num_kv_heads, num_keys, dim) for dim in (config.head_dim, config.value_dim))
        mask = causal_mask(np.array([SEGMENT - 1]), 1)
        return _agree(lambda q: attend(q, keys, values, mask), [queries], [group * n for n in PIECES], axis=1)

    def scores_alike(num_keys: int) -> bool:
        if config.indexer is None:
            return True
        keys = normal(num_keys, config.indexer.head_dim)
        rows = normal(1, num_rows, config.indexer.head_dim)
        ones = np.ones((num_rows, 1), dtype=np.float32)
        return _agree(lambda q: step_tensor(index_scores(q, keys, ones[: q.shape[1]])), [rows], PIECES, axis=1, to=0)

    with paddle.no_grad():
        return (
            _agree(lambda rows: paddle.concat([each.flatten(1) for each in layer.project(rows)], 1), [x], PIECES)
            and _agree(layer.finish, [x, attention], PIECES)
            and _agree(lambda rows: linear(rows, lm_head), [x], PIECES)
            and all(attends_alike(segments * SEGMENT) for segments in KEY_SEGMENTS)
            and all(scores_alike(segments * SEGMENT) for segments in KEY_SEGMENTS)
        )


def _agree(
    compute: Callable[..., Tensor],
    operands: list[Tensor],
    pieces: list[int] | tuple[int, ...],
    axis: int = 0,
    to: int | None = None,
) -> bool:
    """`compute` maps the rows of `axis` to those of axis `to`, or of the same."""
    whole = compute(*operands)
    split = zip(*(paddle.split(operand, list(pieces), axis) for operand in operands), strict=True)
    joined = paddle.concat([compute(*piece) for piece in split], axis if to is None else to)
    return np.array_equal(as_array(whole).view(np.uint32), as_array(joined).view(np.uint32))
