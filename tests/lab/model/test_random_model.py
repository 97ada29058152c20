"""The random model's directory is one that transformers, and so FastDeploy, reads like any other."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from fastdeploy_kvcache_v1.lab.model.directory import RANDOM_DIRECTORY, read_seed, write_random_directory
from fastdeploy_kvcache_v1.lab.model.vision import PATCH, Image, PlacedImage, place_images

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END, IMAGE = range(256, 264)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(RANDOM_DIRECTORY)


@pytest.mark.parametrize("text", ["", "hello  world\n", " 你好, wörld \U0001f680", bytes(range(128)).decode()])
def test_a_token_is_a_byte(tokenizer, text):
    assert tokenizer.encode(text) == [BOS, *text.encode()]
    assert tokenizer.decode([*text.encode(), EOS], skip_special_tokens=True) == text


def test_bytes_that_are_no_text_are_replaced(tokenizer):
    assert tokenizer.decode([104, 0xE4, 0xBD]) == "h\ufffd"


def test_special_tokens_lie_above_the_bytes(tokenizer):
    config = AutoConfig.from_pretrained(RANDOM_DIRECTORY)
    assert (len(tokenizer), config.vocab_size) == (IMAGE + 1, IMAGE + 1)
    assert (tokenizer.eos_token_id, tokenizer.image_token_id, config.eos_token_id) == (EOS, IMAGE, EOS)


def test_the_chat_template_names_each_turn_and_places_images(tokenizer):
    messages = [
        {"role": "developer", "content": "be  good\n"},
        {"role": "user", "content": ["<", {"type": "image", "num_tokens": 3}, {"type": "text", "text": "> ?"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": " 7 "},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == [
        *(BOS, SYSTEM, *b"be  good\n", END, USER, *b"<", IMAGE, IMAGE, IMAGE, *b"> ?", END),
        *(ASSISTANT, END, TOOL, *b" 7 ", END, ASSISTANT),
    ]
    with pytest.raises(Exception, match="unknown message role 'clown': choose one of system"):
        tokenizer.apply_chat_template([{"role": "clown", "content": ""}])


def test_weights_are_told_apart_by_their_seed(tmp_path):
    one, two = (write_random_directory(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert (one / "tokenizer.json").read_bytes() == (RANDOM_DIRECTORY / "tokenizer.json").read_bytes()
    assert (one / "model.safetensors").read_bytes() != (two / "model.safetensors").read_bytes()
    assert [read_seed(path) for path in (one, two)] == [1, 2]


# ---- what it sees of images: each pixel counts, and nothing but the image does


def pixels(rows: int, columns: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(rows * columns * PATCH * PATCH * 3)


def image(rows: int, columns: int, seed: int = 0) -> Image:
    return Image.of(rows, columns, pixels(rows, columns, seed))


def numbers(image: Image) -> list[int]:
    return [image.number(index) for index in range(image.num_tokens)]


def test_each_placeholder_has_a_number_of_its_own_above_the_token_ids() -> None:
    seen = numbers(image(3, 5))
    assert len({*seen}) == 15
    assert all(2**62 <= each < 2**63 for each in seen)
    assert numbers(image(3, 5)) == seen


def test_every_part_of_an_image_changes_every_patch() -> None:
    """A cached block of the first patches must not serve an image that differs below them."""
    content = pixels(4, 4)
    base = Image.of(4, 4, content)
    for position in (0, len(content) // 2 + 5, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 0x80
        other = Image.of(4, 4, bytes(changed))
        assert other.content_hash != base.content_hash
        assert not {*numbers(other)} & {*numbers(base)}


def test_the_shape_counts_not_only_the_pixels() -> None:
    flat, tall = (Image.of(rows, columns, pixels(1, 4)) for rows, columns in ((1, 4), (4, 1)))
    assert flat.content_hash != tall.content_hash
    assert not {*numbers(flat)} & {*numbers(tall)}


def test_chunks_put_together_are_the_whole() -> None:
    images = (PlacedImage(3, image(2, 2)), PlacedImage(7, image(1, 1, 1)), PlacedImage(12, image(2, 4, 2)))
    whole = np.arange(25)
    place_images(images, whole, 0)
    assert whole.tolist() == [
        *(0, 1, 2, *numbers(images[0].image), *numbers(images[1].image)),
        *(8, 9, 10, 11, *numbers(images[2].image), 20, 21, 22, 23, 24),
    ]
    for size in (1, 2, 3, 5, 8, 24):
        cut = [np.arange(start, min(25, start + size)) for start in range(0, 25, size)]
        for tokens in cut:
            place_images(images, tokens, int(tokens[0]))
        assert np.concatenate(cut).tolist() == whole.tolist()
