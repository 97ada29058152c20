"""Cache rows of sparse attention: fp8 values, a float32 scale for every 128 of them, then bfloat16 values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..attention.dsa import QUANT_BLOCK
from . import fp8
from .paged_cache import RowCache
from .tensors import as_array, step_tensor

Tensor = Any


class PackedCache(RowCache):
    """View of a uint8 cache tensor `[..., row bytes]` as one row per token. Shares its memory."""

    def __init__(self, cache: Tensor, *, num_quantized: int) -> None:
        self._rows = as_array(cache, np.uint8).reshape(-1, cache.shape[-1])
        self._num_quantized = num_quantized
        self._plain_at = num_quantized + num_quantized // QUANT_BLOCK * 4

    def write(self, index: Tensor, values: Tensor) -> None:
        array = as_array(values)
        codes, scales = fp8.quantize(array[:, : self._num_quantized].reshape(len(array), -1, QUANT_BLOCK))
        parts = [codes.reshape(len(array), -1), _bytes(scales), _bytes(_to_bfloat16(array[:, self._num_quantized :]))]
        self._rows[as_array(index, np.int64)] = np.concatenate(parts, axis=1)

    def read(self, index: Tensor) -> Tensor:
        rows = self._rows[as_array(index, np.int64)]
        codes = rows[:, : self._num_quantized].reshape(len(rows), -1, QUANT_BLOCK)
        scales = np.ascontiguousarray(rows[:, self._num_quantized : self._plain_at]).view(np.float32)
        plain = np.ascontiguousarray(rows[:, self._plain_at :]).view(np.uint16)
        quantized = fp8.dequantize(codes, scales).reshape(len(rows), -1)
        return step_tensor(np.concatenate([quantized, _from_bfloat16(plain)], axis=1))


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest, of two equally near to the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _from_bfloat16(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (halves.astype(np.uint32) << 16).view(np.float32)
