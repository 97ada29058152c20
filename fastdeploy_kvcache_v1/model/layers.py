"""One decoder layer on rows: the stages of its computation around the cache.

Rule: whatever rounds differently when its shape changes (matrix products, reductions, exp) gets rows as `plan.RowCut`
says. On any number of rows at once run only copies, and operations on matching elements that IEEE 754 rounds alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle.incubate.nn.functional import fused_rms_norm

from .config import ModelConfig
from .reproducible import has_avx512
from .tensors import as_array

if TYPE_CHECKING:
    from .attention import Projection
    from .weights import DraftWeights, LayerWeights

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


def weight_tensor(array: NDArray[np.float32] | None) -> Tensor:
    """On paddle's device; None stays None."""
    return None if array is None else paddle.to_tensor(np.ascontiguousarray(array))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = paddle.matmul(x, weight, transpose_y=True)
    return product if bias is None else product + bias


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: NDArray[np.float32]) -> Tensor:
    """Softmax attention of a bucket, `[num_kv_heads, group * rows, head_dim]` like `queries`.

    `keys` and `values` are `[num_kv_heads, n, head_dim]`, values of any width; `mask` is `[group * rows, m]`, for the
    last m keys.
    """
    scores = paddle.matmul(queries, keys, transpose_y=True)
    as_array(scores)[:, :, -mask.shape[1] :] += mask
    # A masked key adds 0 * its value, and whether that is +0 or -0 depends on what the key is: the last addition
    # turns a sum of -0 into +0.
    return paddle.matmul(F.softmax(scores), values) + 0.0


class DecoderLayer:
    """The weights of one layer on paddle's device, and what it computes before and after attention."""

    def __init__(self, weights: LayerWeights, config: ModelConfig, projection: Projection) -> None:
        self._epsilon = config.rms_norm_eps
        self._projection = projection
        self._input_norm = weight_tensor(weights.input_norm)
        self._output = weight_tensor(weights.attention.output)
        self._output_bias = weight_tensor(weights.attention.output_bias)
        self._mlp_norm = weight_tensor(weights.mlp_norm)
        self._gate = weight_tensor(weights.gate)
        self._up = weight_tensor(weights.up)
        self._down = weight_tensor(weights.down)

    def project(self, x: Tensor) -> list[Tensor]:
        """`[rows, hidden]` -> what attention needs, `[rows, ...]` each."""
        return self._projection(rms_norm(x, self._input_norm, self._epsilon))

    def finish(self, x: Tensor, attention: Tensor) -> Tensor:
        """What follows attention `[rows, num_heads * value_dim]`: its output projection, then the MLP."""
        x = x + linear(attention, self._output, self._output_bias)
        hidden = rms_norm(x, self._mlp_norm, self._epsilon)
        return x + linear(F.silu(linear(hidden, self._gate)) * linear(hidden, self._up), self._down)


class DraftInput:
    """What leads into the draft layer."""

    def __init__(self, weights: DraftWeights, config: ModelConfig) -> None:
        self._epsilon = config.rms_norm_eps
        self._embedding_norm = weight_tensor(weights.embedding_norm)
        self._hidden_norm = weight_tensor(weights.hidden_norm)
        self._join = weight_tensor(weights.join)

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` of both -> of the draft layer's input."""
        embedded = rms_norm(embedded, self._embedding_norm, self._epsilon)
        hidden = rms_norm(hidden, self._hidden_norm, self._epsilon)
        return linear(paddle.concat([embedded, hidden], axis=1), self._join)
