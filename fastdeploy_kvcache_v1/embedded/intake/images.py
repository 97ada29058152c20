"""Images of a request: data URLs, decoded within bounds. Nothing is fetched.

Decoding is what attackers of servers with images aim at, so it is done in the intake process, whose CPU time and memory
end with its limits; a file says how large its image is before any pixel is unpacked.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import NamedTuple

from ...model.vision import MAX_SIDE, PATCH, Image

MAX_IMAGES = 16
"""Of one request."""

MAX_PIXELS = 2048 * 2048
FORMATS = ("PNG", "JPEG", "WEBP")
PREFIX = "data:image/"


class ImagesLeftError(Exception):
    """The request has images, which are not decoded here."""


class ImageUrl(NamedTuple):
    """Part of a message."""

    url: object
    """As the client sent it."""


def read_image(url: object) -> Image:
    """The image of a data URL as the model sees it: no larger than `MAX_SIDE` patches a side, its shape kept as far as
    whole patches allow. Raises `ValueError`, one line, for anything else.
    """
    if not isinstance(url, str) or not url.startswith(PREFIX):
        raise ValueError(f"image_url must be a data URL ({PREFIX}png;base64,...): this server fetches nothing")
    kind, comma, data = url.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise ValueError(f"image_url must be a data URL in base64 ({PREFIX}png;base64,...)")
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("image_url holds no valid base64") from None
    return _decoded(content)


def _decoded(content: bytes) -> Image:
    from PIL import Image as Pillow  # only where an image comes: a text needs none of it

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what is too large, and our own bound is lower
            with Pillow.open(io.BytesIO(content), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > MAX_PIXELS:
                    raise _TooLargeError(f"the image has {width} x {height} pixels, at most {MAX_PIXELS} are decoded")
                columns, rows = _patches(width, height)
                picture = opened.convert("RGB").resize((columns * PATCH, rows * PATCH), Pillow.Resampling.BILINEAR)
                return Image(rows, columns, picture.tobytes())
    except (_TooLargeError, MemoryError):
        raise
    except Pillow.DecompressionBombError:
        raise _TooLargeError(f"the image has far more pixels than the {MAX_PIXELS} that are decoded") from None
    except Exception as error:  # Pillow's decoders raise whatever a damaged file makes them raise
        kinds = ", ".join(FORMATS)
        raise ValueError(f"image_url holds no image of the formats {kinds} that can be read: {error}") from None


class _TooLargeError(ValueError):
    pass


def _patches(width: int, height: int) -> tuple[int, int]:
    """Columns and rows. A side is scaled down with the other one; it has a patch at least."""
    scale = min(1.0, MAX_SIDE * PATCH / max(width, height))
    columns, rows = (max(1, min(MAX_SIDE, -(-int(side * scale) // PATCH))) for side in (width, height))
    return columns, rows
