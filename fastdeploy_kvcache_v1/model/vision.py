"""The eyes of the random model: an image becomes one embedding per patch, in place of its placeholder tokens.

Whole numbers only, up to the last multiplication: an embedding has the same bits on any machine, with any library, and
whatever else is computed beside it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PATCH = 16
"""Pixels of a patch's side. A patch is one token."""

MAX_SIDE = 8
"""Patches of an image's side, at most."""

PATCH_BYTES = PATCH * PATCH * 3


@dataclass(frozen=True)
class Image:
    """What the model sees of an image: RGB, `rows` by `columns` patches, in reading order."""

    rows: int
    columns: int
    pixels: bytes
    """uint8 `[rows * PATCH, columns * PATCH, 3]`."""

    def __post_init__(self) -> None:
        if not (0 < self.rows <= MAX_SIDE and 0 < self.columns <= MAX_SIDE):
            raise ValueError(f"an image must have 1 to {MAX_SIDE} patches a side, got {self.rows} by {self.columns}")
        if len(self.pixels) != self.num_tokens * PATCH_BYTES:
            raise ValueError(f"{self.num_tokens} patches have {self.num_tokens * PATCH_BYTES} bytes of pixels")

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @cached_property
    def content_hash(self) -> str:
        """Of what the model sees: equal hashes mean equal embeddings."""
        return sha256(struct.pack("<QQ", self.rows, self.columns) + self.pixels).hexdigest()

    def patches(self) -> NDArray[np.uint8]:
        """`[num_tokens, PATCH_BYTES]`"""
        pixels = np.frombuffer(self.pixels, np.uint8).reshape(self.rows, PATCH, self.columns, PATCH, 3)
        return np.ascontiguousarray(pixels.transpose(0, 2, 1, 3, 4)).reshape(self.num_tokens, PATCH_BYTES)


class PlacedImage(NamedTuple):
    offset: int
    """Position of its first placeholder in the request."""
    image: Image

    @property
    def end(self) -> int:
        return self.offset + self.image.num_tokens


class EmbeddedRows(NamedTuple):
    """Embeddings that take the place of those of some tokens of a slice."""

    first: int
    """Token of the slice."""
    values: NDArray[np.float32]
    """`[n, hidden]`"""


class VisionEncoder:
    """Random weights that depend on `seed` only. Immutable."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        random = np.random.Generator(np.random.Philox(key=[seed, 0x5EE]))
        self._inner = random.integers(-8, 9, (PATCH_BYTES, hidden_size), dtype=np.int64)
        self._outer = random.integers(-8, 9, (hidden_size, hidden_size), dtype=np.int64)
        self._places = random.integers(-2048, 2049, (MAX_SIDE, MAX_SIDE, hidden_size), dtype=np.int64)
        self._scale = np.float32(2.0**-12)

    def encode(self, image: Image) -> NDArray[np.float32]:
        """`[num_tokens, hidden]`: each patch by its pixels, its place, and a little of all the others."""
        inner = np.clip((image.patches().astype(np.int64) - 128) @ self._inner >> 7, -127, 127)
        inner += inner.sum(axis=0) // image.num_tokens
        values = inner @ self._outer + self._places[: image.rows, : image.columns].reshape(image.num_tokens, -1)
        embeddings: NDArray[np.float32] = np.clip(values, -16384, 16384).astype(np.float32) * self._scale
        return embeddings

    def rows_of(self, images: tuple[PlacedImage, ...], start: int, end: int) -> tuple[EmbeddedRows, ...]:
        """Those of the positions `[start, end)` of a request."""
        found = []
        for placed in images:
            first, last = max(start, placed.offset), min(end, placed.end)
            if first < last:
                values = self.encode(placed.image)[first - placed.offset : last - placed.offset]
                found.append(EmbeddedRows(first - start, values))
        return tuple(found)
