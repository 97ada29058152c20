"""What the random model sees: each pixel counts, and nothing but the image does."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_kvcache_v1.model.vision import PATCH, PATCH_BYTES, Image, PlacedImage, VisionEncoder

ENCODER = VisionEncoder(32, 0)


def image(rows: int, columns: int, seed: int = 0) -> Image:
    random = np.random.default_rng(seed)
    return Image(rows, columns, random.integers(0, 256, rows * columns * PATCH_BYTES, dtype=np.uint8).tobytes())


def test_patches_are_in_reading_order() -> None:
    pixels = np.zeros((2 * PATCH, 3 * PATCH, 3), dtype=np.uint8)
    pixels[PATCH:, 2 * PATCH :] = 7
    patches = Image(2, 3, pixels.tobytes()).patches()
    assert patches.sum(axis=1).tolist() == [0, 0, 0, 0, 0, 7 * PATCH_BYTES]


def test_any_encoder_of_the_seed_sees_the_same_bits() -> None:
    seen = ENCODER.encode(image(3, 5))
    assert seen.shape == (15, 32)
    assert seen.dtype == np.float32
    assert (VisionEncoder(32, 0).encode(image(3, 5)) == seen).all()
    assert (VisionEncoder(32, 1).encode(image(3, 5)) != seen).any()
    assert 0.3 < seen.std() < 4, "as large as embeddings of tokens"


def test_every_part_of_an_image_changes_every_patch() -> None:
    """A cached block of the first patches must not serve an image that differs below them."""
    base = image(4, 4)
    for position in (0, 7 * PATCH_BYTES + 5, 16 * PATCH_BYTES - 1):
        pixels = bytearray(base.pixels)
        pixels[position] ^= 0x80
        other = Image(4, 4, bytes(pixels))
        assert other.content_hash != base.content_hash
        assert (ENCODER.encode(other) != ENCODER.encode(base)).any()


def test_the_shape_counts_not_only_the_pixels() -> None:
    flat, tall = (Image(rows, columns, bytes(4 * PATCH_BYTES)) for rows, columns in ((1, 4), (4, 1)))
    assert flat.content_hash != tall.content_hash
    assert (ENCODER.encode(flat) != ENCODER.encode(tall)).any()


@pytest.mark.parametrize(("rows", "columns", "size"), [(0, 1, 0), (9, 1, 9), (1, 9, 9), (2, 2, 3), (1, 1, 2)])
def test_what_is_no_image_is_refused(rows: int, columns: int, size: int) -> None:
    with pytest.raises(ValueError, match="patches"):
        Image(rows, columns, bytes(size * PATCH_BYTES))


def test_chunks_put_together_are_the_whole() -> None:
    images = (PlacedImage(3, image(2, 2)), PlacedImage(7, image(1, 1, 1)), PlacedImage(12, image(2, 4, 2)))
    whole = np.zeros((25, 32), dtype=np.float32)
    for rows in ENCODER.rows_of(images, 0, 25):
        whole[rows.first : rows.first + len(rows.values)] = rows.values
    assert (whole[3:7] == ENCODER.encode(images[0].image)).all()
    assert [each.first for each in ENCODER.rows_of(images, 0, 25)] == [3, 7, 12]
    for size in (1, 2, 3, 5, 8, 24):
        cut = np.zeros_like(whole)
        for start in range(0, 25, size):
            for rows in ENCODER.rows_of(images, start, min(25, start + size)):
                first = start + rows.first
                cut[first : first + len(rows.values)] = rows.values
        assert (cut == whole).all()
