"""One decoder layer on tiles. Every function that takes a tile sees the same shapes for a token at a given position.

Rule: whatever rounds differently when its shape changes (GEMM, reductions, exp) runs on one tile at a time. Across
tiles run only copies, and additions and multiplications of matching elements, which IEEE 754 rounds alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.incubate.nn.functional import fused_rms_norm

from .config import ModelConfig
from .plan import SEGMENT, TILE
from .reproducible import has_avx512
from .tensors import step_tensor
from .weights import LayerWeights

Tensor = Any
"""paddle.Tensor; paddle is untyped here."""

FUSED_NORM = has_avx512()
"""paddle's fused kernel asks no processor what it can do: where AVX-512 is missing, it kills the process (SIGILL)."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last axis of `[rows, n]`."""
    if FUSED_NORM:
        return fused_rms_norm(x, weight, None, epsilon, 1)[0]
    return x * paddle.rsqrt(paddle.mean(x * x, axis=-1, keepdim=True) + epsilon) * weight


def causal_masks(config: ModelConfig) -> list[Tensor]:
    """By variant: `[num_kv_heads, group * TILE, SEGMENT]`, 0 where a row may look at a key of its segment, else -inf.

    Not broadcast when added: paddle's elementwise kernels are many times slower then.
    """
    group = config.num_heads // config.num_kv_heads
    keys, rows = np.arange(SEGMENT), np.arange(TILE)[:, None]
    masks = []
    for variant in range(SEGMENT // TILE):
        mask = np.where(keys <= variant * TILE + rows, np.float32(0), np.float32(-np.inf))
        masks.append(paddle.to_tensor(np.tile(mask, (config.num_kv_heads, group, 1))))
    return masks


class Rotation:
    """Rotary embedding of all rows of a batch at once, made once per forward pass.

    Works on whole rows `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`: values get an angle of 0, which leaves
    them as they are and saves taking the row apart.
    """

    def __init__(self, cos: np.ndarray[Any, Any], sin: np.ndarray[Any, Any], config: ModelConfig) -> None:
        """`cos` and `sin`: float32 `[rows, head_dim]` as made by `rope.rope_tables`."""
        rows, head_dim = cos.shape
        rotated, heads = config.num_heads + config.num_kv_heads, config.num_heads + 2 * config.num_kv_heads
        full_cos = np.ones((rows, heads, head_dim), dtype=np.float32)
        full_sin = np.zeros_like(full_cos)
        full_cos[:, :rotated], full_sin[:, :rotated] = cos[:, None], sin[:, None]
        self._cos = step_tensor(full_cos.reshape(rows, -1))
        self._sin = step_tensor(full_sin.reshape(rows, -1))
        self._half = head_dim // 2
        # Rows of the tensor cut into half heads, each pair swapped.
        self._swapped = step_tensor(np.arange(rows * heads * 2).reshape(-1, 2)[:, ::-1].ravel())

    def apply(self, qkv: Tensor) -> Tensor:
        swapped = paddle.gather(qkv.reshape([-1, self._half]), self._swapped).reshape(qkv.shape)
        return qkv * self._cos + swapped * self._sin


class DecoderLayer:
    """The weights of one layer on paddle's device, and the two stages of its computation around the cache."""

    def __init__(self, weights: LayerWeights, config: ModelConfig) -> None:
        def tensor(array: np.ndarray[Any, Any] | None) -> Tensor:
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
        self._gate_up = tensor(weights.gate_up)
        self._down = tensor(weights.down)

    def project(self, x: Tensor) -> Tensor:
        """Tile `[TILE, hidden]` -> its queries, keys and values `[TILE, (heads + 2 * kv_heads) * head_dim]`."""
        qkv = paddle.matmul(rms_norm(x, self._input_norm, self._config.rms_norm_eps), self._qkv)
        if self._qkv_bias is not None:
            qkv = qkv + self._qkv_bias
        return qkv if self._qk_norm is None else self._normalize_heads(qkv)

    def _normalize_heads(self, qkv: Tensor) -> Tensor:
        config = self._config
        width = (config.num_heads + config.num_kv_heads) * config.head_dim
        qk, values = paddle.split(qkv, [width, qkv.shape[1] - width], axis=1)
        qk = rms_norm(qk.reshape([-1, config.head_dim]), self._ones, config.rms_norm_eps)
        return paddle.concat([qk.reshape([TILE, width]) * self._qk_norm, values], axis=1)

    def finish(self, x: Tensor, queries: Tensor, keys: Keys, mask: Tensor) -> Tensor:
        """Attention, then the MLP, of tile `x` `[TILE, hidden]`.

        `queries` are `[num_kv_heads, group * TILE, head_dim]`; `mask` is the tile's variant of `causal_masks`.
        """
        x = x + self._project_output(keys.attend(queries, mask))
        hidden = rms_norm(x, self._mlp_norm, self._config.rms_norm_eps)
        return x + paddle.matmul(F.swiglu(paddle.matmul(hidden, self._gate_up)), self._down)

    def _project_output(self, attention: Tensor) -> Tensor:
        config = self._config
        heads = attention.reshape([config.num_heads, TILE, config.head_dim])
        rows = heads.transpose([1, 0, 2]).reshape([TILE, config.num_heads * config.head_dim])
        output = paddle.matmul(rows, self._output)
        return output if self._output_bias is None else output + self._output_bias


class Keys:
    """Keys and values that the tiles of one bucket look at, float32: `[num_kv_heads, n, head_dim]` each."""

    def __init__(self, head: Tensor | None, tail: Tensor, values: Tensor) -> None:
        """`head`: keys before the last segment; `tail`: keys of the last segment; `values`: values of both."""
        self._head = head
        self._tail = tail
        self._values = values

    def attend(self, queries: Tensor, mask: Tensor) -> Tensor:
        """Softmax attention, `[num_kv_heads, group * TILE, head_dim]`."""
        scores = paddle.matmul(queries, self._tail, transpose_y=True) + mask
        if self._head is not None:
            scores = paddle.concat([paddle.matmul(queries, self._head, transpose_y=True), scores], axis=2)
        # A masked key adds 0 * its value, and whether that is +0 or -0 depends on what the key is: the last addition
        # turns a sum of -0 into +0.
        return paddle.matmul(F.softmax(scores), self._values) + 0.0
