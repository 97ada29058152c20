"""Read and write rows of one layer's cache tensors, whatever their dtype."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from . import fp8
from .tensors import as_array, step_tensor

Tensor = Any

_FLOAT16_MAX = 65_504.0


class RowCache(ABC):
    """View of cache tensors as rows of floats: one per token and head. Shares the tensors' memory."""

    @abstractmethod
    def write(self, index: Tensor, values: Tensor) -> None:
        """Store float32 `values` `[n, row]`, rounded to what the cache can hold, in rows `index` and nowhere else."""

    @abstractmethod
    def read(self, index: Tensor) -> Tensor:
        """Rows `index` as float32 `[n, row]`."""


class PagedCache(RowCache):
    """Of one tensor `[num_blocks, num_kv_heads, block_size, head_dim]` of floats.

    Two-byte dtypes are moved as pairs in an int32: paddle's CPU kernels for gathering and scattering rows lack some
    of them.
    """

    def __init__(self, cache: Tensor) -> None:
        self._dtype = str(cache.dtype).removeprefix("paddle.")
        rows = cache.view([-1, cache.shape[3]])
        self._rows = rows if self._dtype == "float32" else rows.view("int32")

    def write(self, index: Tensor, values: Tensor) -> None:
        if self._dtype == "float16":
            # An infinity would turn the masked products of other tokens, 0 * value, into NaN.
            values = paddle.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX)
        if self._dtype != "float32":
            values = values.astype(self._dtype).view("int32")
        paddle.scatter_(self._rows, index, values)

    def read(self, index: Tensor) -> Tensor:
        rows = paddle.gather(self._rows, index)
        return rows if self._dtype == "float32" else rows.view(self._dtype).astype("float32")


class ScaledCache(RowCache):
    """Of a tensor `[num_blocks, num_kv_heads, block_size, head_dim]` of fp8 in uint8 and its scales, one per row."""

    def __init__(self, cache: Tensor, scales: Tensor) -> None:
        self._codes = as_array(cache, np.uint8).reshape(-1, cache.shape[3])
        self._scales = as_array(scales).reshape(-1)

    def write(self, index: Tensor, values: Tensor) -> None:
        rows = as_array(index, np.int64)
        self._codes[rows], self._scales[rows] = fp8.quantize(as_array(values))

    def read(self, index: Tensor) -> Tensor:
        rows = as_array(index, np.int64)
        return step_tensor(fp8.dequantize(self._codes[rows], self._scales[rows]))


def head_caches(tensors: Sequence[Tensor]) -> tuple[RowCache, RowCache]:
    """Keys and values of a layer: two tensors, or two and their scales, in the order of roles."""
    if len(tensors) == 4:
        return ScaledCache(tensors[0], tensors[2]), ScaledCache(tensors[1], tensors[3])
    return PagedCache(tensors[0]), PagedCache(tensors[1])
