"""One decoder layer on rows: the stages of its computation around the cache.

Rule: whatever rounds differently when its shape changes (matrix products, reductions, exp) gets rows as `plan.RowCut`
says. On any number of rows at once run only copies, and operations on matching elements that IEEE 754 rounds alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle.incubate.nn.functional import fused_rms_norm

from .config import ModelConfig
from .plan import SEGMENT
from .reproducible import has_avx512
from .tensors import as_array
from .weights import LayerWeights

Tensor = Any
"""paddle.Tensor; paddle is untyped here."""

FUSED_NORM = has_avx512()
"""paddle's fused kernel asks no processor what it can do: where AVX-512 is missing, it kills the process (SIGILL)."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last axis of `[rows, n]`."""
    if FUSED_NORM:
        return fused_rms_norm(x, weight, None, epsilon, 1)[0]
    # In NumPy: paddle's rsqrt rounds differently in the last elements of a vector, and it is slow where it broadcasts.
    result = paddle.empty(x.shape, dtype=x.dtype)  # FastDeploy sets another default
    rows, out = as_array(x), as_array(result)
    square_mean = np.einsum("ij,ij->i", rows, rows) / np.float32(rows.shape[1])
    np.multiply(rows, (1 / np.sqrt(square_mean + np.float32(epsilon)))[:, None], out=out)
    out *= as_array(weight)
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = paddle.matmul(x, weight, transpose_y=True)
    return product if bias is None else product + bias


class Rotation:
    """Rotary embedding of all rows of a batch at once, made once per forward pass."""

    def __init__(self, cos: NDArray[np.float32], sin: NDArray[np.float32], config: ModelConfig) -> None:
        """`cos` and `sin`: `[rows, head_dim // 2]` as made by `rope.rope_tables`."""
        self._cos, self._sin = cos[:, None], sin[:, None]
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim

    def apply_(self, qkv: Tensor) -> None:
        """Turns the queries and keys of `[rows, (num_heads + 2 * num_kv_heads) * head_dim]` in place."""
        array = as_array(qkv)
        halves = array.reshape(len(array), -1, 2, self._head_dim // 2)[:, : self._num_rotated]
        first, second = halves[:, :, 0], halves[:, :, 1]
        turned = first * self._cos - second * self._sin
        second *= self._cos
        second += first * self._sin
        first[...] = turned


def causal_mask(first: int, num_rows: int, config: ModelConfig) -> NDArray[np.float32]:
    """`[group * num_rows, SEGMENT]`: 0 where row `i` looks at a key of its segment, up to `first + i`, else -inf."""
    last_keys = np.tile(first + np.arange(num_rows), config.num_heads // config.num_kv_heads)
    return np.where(np.arange(SEGMENT) <= last_keys[:, None], np.float32(0), np.float32(-np.inf))


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: NDArray[np.float32]) -> Tensor:
    """Softmax attention of a bucket, `[num_kv_heads, group * rows, head_dim]` like `queries`.

    `keys` and `values` are `[num_kv_heads, n, head_dim]`; `mask` is the bucket's `causal_mask`, for the last segment.
    """
    scores = paddle.matmul(queries, keys, transpose_y=True)
    as_array(scores)[:, :, -SEGMENT:] += mask
    # A masked key adds 0 * its value, and whether that is +0 or -0 depends on what the key is: the last addition
    # turns a sum of -0 into +0.
    return paddle.matmul(F.softmax(scores), values) + 0.0


class DecoderLayer:
    """The weights of one layer on paddle's device, and what it computes before and after attention."""

    def __init__(self, weights: LayerWeights, config: ModelConfig) -> None:
        def tensor(array: NDArray[np.float32] | None) -> Tensor:
            return None if array is None else paddle.to_tensor(np.ascontiguousarray(array))

        self._config = config
        self._input_norm = tensor(weights.input_norm)
        self._qkv = tensor(weights.qkv)
        self._qkv_bias = tensor(weights.qkv_bias)
        self._qk_norm = tensor(weights.qk_norm)
        self._ones = paddle.ones([config.head_dim], dtype="float32")
        self._output = tensor(weights.output)
        self._output_bias = tensor(weights.output_bias)
        self._mlp_norm = tensor(weights.mlp_norm)
        self._gate = tensor(weights.gate)
        self._up = tensor(weights.up)
        self._down = tensor(weights.down)

    def project(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` -> queries, keys and values `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`."""
        qkv = linear(rms_norm(x, self._input_norm, self._config.rms_norm_eps), self._qkv, self._qkv_bias)
        return qkv if self._qk_norm is None else self._normalize_heads(qkv)

    def _normalize_heads(self, qkv: Tensor) -> Tensor:
        config = self._config
        width = (config.num_heads + config.num_kv_heads) * config.head_dim
        qk, values = paddle.split(qkv, [width, qkv.shape[1] - width], axis=1)
        qk = rms_norm(qk.reshape([-1, config.head_dim]), self._ones, config.rms_norm_eps)
        return paddle.concat([qk.reshape([-1, width]) * self._qk_norm, values], axis=1)

    def finish(self, x: Tensor, attention: Tensor) -> Tensor:
        """What follows attention `[rows, num_heads * head_dim]`: its output projection, then the MLP."""
        x = x + linear(attention, self._output, self._output_bias)
        hidden = rms_norm(x, self._mlp_norm, self._config.rms_norm_eps)
        return x + linear(F.silu(linear(hidden, self._gate)) * linear(hidden, self._up), self._down)
