"""Images of a request: what is read, what is refused, and what a file may cost."""

from __future__ import annotations

import base64
import struct
import zlib
from types import SimpleNamespace

import pytest
from PIL import Image as Pillow

from fastdeploy_kvcache_v1.lab.model.vision import MAX_SIDE, PATCH, Image
from fastdeploy_kvcache_v1.lab.server.images import read_image
from tests.lab.server import random_text as t
from tests.lab.server.pictures import encoded, noise, part, text
from tests.lab.server.test_requests import read, refusal


def chat(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def data_url(content, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def claims(width, height):
    """A PNG of a few bytes that says it is so large."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ((16, 16), (1, 1)),
        ((17, 16), (1, 2)),
        ((64, 32), (2, 4)),
        ((128, 128), (8, 8)),
        ((1280, 640), (4, 8)),
        ((3, 2048), (8, 1)),
        ((2048, 2048), (8, 8)),
    ],
)
def test_an_image_has_a_placeholder_for_each_patch(size, shape):
    rows, columns = shape
    red = Image.of(rows, columns, b"\xff\x00\x00" * (rows * columns * PATCH**2))
    assert read_image(encoded(Pillow.new("RGB", size, "red"))) == red
    assert red.num_tokens == rows * columns


def test_equal_pixels_are_one_image_whatever_the_file():
    picture = noise(32, 32)
    with_alpha = picture.copy()
    with_alpha.putalpha(255)
    hashes = {read_image(encoded(each)).content_hash for each in (picture, with_alpha)}
    hashes.add(read_image(encoded(picture, "WEBP").replace("webp", "png")).content_hash)
    assert len(hashes) == 2, "a WEBP that loses something is another image; what the URL calls it does not count"
    assert read_image(encoded(noise(32, 32, 1))).content_hash not in hashes


def test_placeholders_stand_where_the_images_do():
    one, two = noise(16, 16), noise(40, 16, 1)
    urls = [encoded(one), encoded(two)]
    reading = read(chat(text("ab"), part(urls[0]), part(urls[1]), text("c"), part(urls[0])))
    image = t.IMAGE
    assert reading.token_ids == (t.BOS, t.USER, *b"ab", image, *[image] * 3, *b"c", image, t.END, t.ASSISTANT)
    assert [(placed.offset, placed.image.num_tokens) for placed in reading.images] == [(4, 1), (5, 3), (9, 1)]
    assert reading.images[0].image == reading.images[2].image == read_image(urls[0])


def test_the_short_form_of_a_url_is_read_and_null_is_no_image():
    url = encoded(noise(16, 16))
    short = {"type": "image_url", "image_url": url}
    assert read(chat(short)).images == read(chat(part(url))).images
    assert "must be a data URL" in refusal(chat(part(None)))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/a.png", "this server fetches nothing"),
        ("file:///etc/passwd", "this server fetches nothing"),
        (7, "must be a data URL"),
        ("data:text/plain;base64,aGk=", "must be a data URL"),
        ("data:image/png,abc", "in base64"),
        ("data:image/png;base64", "in base64"),
        ("data:image/png;base64,@@@", "no valid base64"),
        ("data:image/png;base64,", "that can be read"),
        (data_url(b"no picture"), "that can be read"),
        (data_url(b"<svg/>", "svg+xml"), "that can be read"),
        (data_url(claims(16, 16)), "that can be read"),
        (encoded(noise(16, 16), "GIF"), "PNG, JPEG, WEBP"),
    ],
)
def test_what_is_no_image_is_one_line(url, message):
    found = refusal(chat(text("x"), part(url)))
    assert found.startswith("messages: ")
    assert message in found
    assert "\n" not in found
    assert " 0x" not in found


def test_a_bomb_is_refused_by_what_it_says_of_itself():
    """Pillow's own bound; the number of pixels that this says is decoded nowhere."""
    assert "that can be read" in refusal(chat(part(data_url(claims(60_000, 60_000)))))


def test_images_count_as_tokens():
    side = MAX_SIDE * PATCH
    assert "too long for --max-model-len 200" in refusal(chat(*[part(encoded(noise(side, side)))] * 4))


def test_a_model_that_sees_none_says_so():
    assert "this model sees no images" in refusal(chat(part("data:")), SimpleNamespace(image_token=None))


def test_a_text_beside_images_holds_no_placeholder():
    url = encoded(noise(16, 16))
    assert "must not hold <|image|>" in refusal(chat(text("see <|image|>"), part(url)))
