"""Images of the random model: numbers made of an image's content replace its placeholder tokens."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PATCH = 16
"""Pixels of a patch's side. A patch is one token."""

MAX_SIDE = 8
"""Largest number of patches of an image's side."""


class Image(NamedTuple):
    """An image as the model sees it: a token per patch, and a hash of its content."""

    num_tokens: int
    content_hash: str

    @classmethod
    def of(cls, rows: int, columns: int, pixels: bytes) -> Image:
        """`pixels` are RGB, uint8 `[rows * PATCH, columns * PATCH, 3]`."""
        return cls(rows * columns, sha256(struct.pack("<QQ", rows, columns) + pixels).hexdigest())

    def number(self, index: int) -> int:
        """The number for placeholder `index`: depends on the whole content, and is above all token ids."""
        return int.from_bytes(sha256(f"{self.content_hash} {index}".encode()).digest()[:7], "big") | 1 << 62


class PlacedImage(NamedTuple):
    offset: int
    """Position of its first placeholder in the request."""
    image: Image

    @property
    def end(self) -> int:
        return self.offset + self.image.num_tokens


def place_images(images: Iterable[PlacedImage], token_ids: NDArray[np.int64], start: int) -> None:
    """Replace the placeholders by numbers of their images. The first of `token_ids` is at `start`."""
    for placed in images:
        for position in range(max(start, placed.offset), min(start + len(token_ids), placed.end)):
            token_ids[position - start] = placed.image.number(position - placed.offset)
