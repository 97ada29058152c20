"""Numbers of one byte: 4 bits of exponent, 3 of mantissa, no infinity, at most 448 (e4m3fn). NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LARGEST = np.float32(448)


def _table() -> Float:
    codes = np.arange(127)  # 127 stands for "not a number"
    exponent, mantissa = codes >> 3, codes & 7
    subnormal = exponent == 0
    table: Float = ((mantissa + 8 * ~subnormal) * 2.0 ** (np.maximum(exponent, 1) - 10)).astype(np.float32)
    return table


_POSITIVE = _table()
_BETWEEN = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2
_VALUES = np.concatenate([_POSITIVE, [np.nan], -_POSITIVE, [np.nan]]).astype(np.float32)
"""By code."""


def encode(values: Float) -> Bytes:
    """To the nearest, of two equally near to the even code; what is too large becomes the largest."""
    size = np.abs(values)
    codes = np.searchsorted(_BETWEEN, size)  # of two equally near, the lower one
    ends = np.minimum(codes, len(_BETWEEN) - 1)
    codes += (_BETWEEN[ends] == size) & (codes % 2 == 1) & (codes < len(_BETWEEN))
    signed: Bytes = (codes + 128 * np.signbit(values)).astype(np.uint8)
    return signed


def decode(codes: Bytes) -> Float:
    values: Float = _VALUES[codes]
    return values


def quantize(values: Float) -> tuple[Bytes, Float]:
    """Codes of `[..., n]` and a scale for each row of n, `[...]`: the largest value becomes the largest code."""
    largest = np.abs(values).max(axis=-1)
    scales = np.where(largest > 0, largest / LARGEST, np.float32(1)).astype(np.float32)
    return encode(values / scales[..., None]), scales


def dequantize(codes: Bytes, scales: Float) -> Float:
    """The way back, to `[..., n]`."""
    values = decode(codes)
    values *= scales[..., None]
    return values
