"""Images of the random model: numbers made of an image's content take the place of its placeholder tokens."""

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
"""Patches of an image's side, at most."""


class Image(NamedTuple):
    """What the model sees of an image: a token for each patch, and a name that no other image has."""

    num_tokens: int
    content_hash: str

    @classmethod
    def of(cls, rows: int, columns: int, pixels: bytes) -> Image:
        """`pixels` are RGB, uint8 `[rows * PATCH, columns * PATCH, 3]`."""
        return cls(rows * columns, sha256(struct.pack("<QQ", rows, columns) + pixels).hexdigest())

    def number(self, index: int) -> int:
        """Stands for its placeholder `index`: of the whole content, above every token id."""
        return int.from_bytes(sha256(f"{self.content_hash} {index}".encode()).digest()[:7], "big") | 1 << 62


class PlacedImage(NamedTuple):
    offset: int
    """Position of its first placeholder in the request."""
    image: Image

    @property
    def end(self) -> int:
        return self.offset + self.image.num_tokens


def place_images(images: Iterable[PlacedImage], token_ids: NDArray[np.int64], start: int) -> None:
    """Puts numbers made of the images in place of their placeholders. The first of `token_ids` is at `start`."""
    for placed in images:
        for position in range(max(start, placed.offset), min(start + len(token_ids), placed.end)):
            token_ids[position - start] = placed.image.number(position - placed.offset)
