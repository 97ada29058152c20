"""Write a safetensors file tensor by tensor; the library's own writer wants all of them in memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 8
"""The data starts at a multiple of it: readers map the file into memory."""
FLOAT32_BYTES = 4


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[NDArray[np.float32]]
) -> None:
    """`tensors` come in the order of `shapes`, and have them. Raises `OSError`."""
    header = _header(shapes)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tensor.shape == shape and tensor.dtype == np.float32, f"{name} is not float32 {shape}"
            file.write(np.ascontiguousarray(tensor).data)


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """JSON: type and shape of each tensor, and its bytes `[begin, end)` of the data; then spaces, to align the data."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * FLOAT32_BYTES
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
