"""Images of a request: data URLs. Nothing is fetched."""

from __future__ import annotations

import base64
import io
import logging

from ..model.vision import MAX_SIDE, PATCH, Image

logger = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP")
PREFIX = "data:image/"


def read_image(url: object) -> Image:
    """The image of a data URL, scaled to at most `MAX_SIDE` whole patches a side. Raises `ValueError`, one line."""
    from PIL import Image as Pillow  # only for images

    if not isinstance(url, str) or not url.startswith(PREFIX):
        raise ValueError(f"image_url must be a data URL ({PREFIX}png;base64,...): this server fetches nothing")
    kind, comma, data = url.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise ValueError(f"image_url must be a data URL in base64 ({PREFIX}png;base64,...)")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:
        raise ValueError("image_url holds no valid base64") from None
    try:
        with Pillow.open(io.BytesIO(content), formats=FORMATS) as opened:
            columns, rows = _patches(*opened.size)
            picture = opened.convert("RGB").resize((columns * PATCH, rows * PATCH), Pillow.Resampling.BILINEAR)
            return Image.of(rows, columns, picture.tobytes())
    except Exception as error:  # Pillow's decoders raise exceptions of many kinds for a damaged file
        logger.debug("an image cannot be read: %s", error)  # its text may hold addresses of this process
        raise ValueError(f"image_url holds no image of the formats {', '.join(FORMATS)} that can be read") from None


def _patches(width: int, height: int) -> tuple[int, int]:
    """Columns and rows, each at least 1."""
    scale = min(1.0, MAX_SIDE * PATCH / max(width, height))
    columns, rows = (max(1, min(MAX_SIDE, -(-int(side * scale) // PATCH))) for side in (width, height))
    return columns, rows
