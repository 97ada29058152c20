"""GGUF version 3: metadata, and tensors as float32. As much of the format as our one file uses."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
BLOCK = 32
"""Elements that share one scale in a quantized tensor."""

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
"""Numbers of metadata types; scalars with their `struct` format."""

Array = NDArray[np.float32]

Q4_1 = np.dtype([("scale", "<f2"), ("least", "<f2"), ("pairs", "u1", BLOCK // 2)])
"""Two elements per byte: one of the block's first half in the low bits, one of its second half in the high bits."""
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)])


def _from_q4_1(blocks: NDArray[np.void]) -> Array:
    steps = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], axis=1).astype(np.float32)
    return steps * blocks["scale"].astype(np.float32)[:, None] + blocks["least"].astype(np.float32)[:, None]


def _from_q8_0(blocks: NDArray[np.void]) -> Array:
    return blocks["values"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]


@dataclass(frozen=True)
class TensorType:
    """How the elements of a tensor are stored: items of `dtype`, each worth `elements` of them."""

    dtype: np.dtype[Any]
    elements: int
    to_float32: Callable[[NDArray[Any]], Array]


TENSOR_TYPES = {
    0: TensorType(np.dtype("<f4"), 1, lambda items: items.astype(np.float32)),
    3: TensorType(Q4_1, BLOCK, _from_q4_1),
    8: TensorType(Q8_0, BLOCK, _from_q8_0),
}


@dataclass(frozen=True)
class TensorPlace:
    shape: tuple[int, ...]
    """Outermost dimension first, as in NumPy."""
    type: TensorType
    offset: int
    """In bytes from the start of the file."""


class GGUF:
    """A file in memory. `metadata` by key; tensors are converted when they are read."""

    def __init__(self, content: bytes) -> None:
        """Raises `ModelError` for another format, version or tensor type."""
        cursor = _Cursor(content)
        version = cursor.scalar("I") if content.startswith(MAGIC) else None
        if version != VERSION:
            raise ModelError(f"cannot read a model file: it is not GGUF version {VERSION}")
        num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_pairs)}
        listed = [_tensor_entry(cursor) for _ in range(num_tensors)]
        start = _aligned(cursor.position, self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        self._content = content
        self._places = {name: TensorPlace(shape, kind, start + offset) for name, shape, kind, offset in listed}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._places

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Raises `KeyError` for an unknown name, as `read` does."""
        return self._places[tensor].shape

    def read(self, tensor: str) -> Array:
        """A new array in the tensor's shape."""
        place = self._places[tensor]
        count = math.prod(place.shape) // place.type.elements
        items = np.frombuffer(self._content, place.type.dtype, count, place.offset)
        return place.type.to_float32(items).reshape(place.shape)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.string()
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
    number = cursor.scalar("I")
    if number not in TENSOR_TYPES:
        raise ModelError(f"cannot read tensor {name} of a GGUF file: its type {number} is not supported")
    return name, shape[::-1], TENSOR_TYPES[number], cursor.scalar("Q")


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = len(MAGIC)

    def scalar(self, form: str) -> Any:
        value = struct.unpack_from(f"<{form}", self._content, self.position)[0]
        self.position += struct.calcsize(f"<{form}")
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.position += size
        return self._content[self.position - size : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            return [self.value(item) for _ in range(count)]
        return self.scalar(SCALARS[kind])
