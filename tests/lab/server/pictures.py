"""Data URLs of small pictures."""

from __future__ import annotations

import base64
import io
import random

from PIL import Image


def encoded(picture: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    picture.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def part(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}
