"""Prompts with images and videos, one after the other, through the real Request and ResourceManagerV1 over our adapter.

What each prompt finds is compared with a definition that knows no blocks and no hashes: two prompts share as many
tokens as are equal in id, item, shape of the item, and place in it.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest

import fastdeploy  # noqa: F401  (first: its modules import each other in a circle)
from fastdeploy.engine.request import ImagePosition
from fastdeploy.multimodal.hasher import MultimodalHasher
from tests.fastdeploy.real_manager import BLOCK_SIZE, make_manager
from tests.fastdeploy.scene import Scene

IMAGE_TOKEN = 9
MERGED = 4
"""Patches in a token."""


class Item(SimpleNamespace):
    """An image or a video of one color: `grid` is frames, height, width in patches."""

    @property
    def pixels(self):
        return np.full([int(np.prod(self.grid)), 3], self.color, dtype="float32")

    @property
    def length(self):
        return int(np.prod(self.grid)) // MERGED


def num_tokens(grid_thw):
    return int(np.prod(grid_thw)) // MERGED


def multimodal_inputs(pieces):
    """As FastDeploy's processors make them, for `pieces` of token ids and items."""
    tokens, positions, items = [], [], []
    for piece in pieces:
        if isinstance(piece, Item):
            positions.append({"offset": len(tokens), "length": piece.length})  # as they come out of JSON
            items.append(piece)
            tokens += [IMAGE_TOKEN] * piece.length
        else:
            tokens += piece
    if not items:
        return tokens, {}
    return tokens, {
        "mm_positions": positions,
        "mm_hashes": [MultimodalHasher.hash_features(item.pixels) for item in items],
        "images": np.vstack([item.pixels for item in items]),
        "grid_thw": np.vstack([item.grid for item in items]),
        "image_patch_id": IMAGE_TOKEN,
        "mm_num_token_func": num_tokens,
    }


def identities(pieces):
    """What decides the KV of each token, beside the tokens before it."""
    for piece in pieces:
        if isinstance(piece, Item):
            for number in range(piece.length):  # a video's later frames change nothing about its first ones
                yield piece.color, piece.grid[0] > 1, tuple(piece.grid[1:]), number
        else:
            yield from piece


def shared(one, other):
    """How many tokens two prompts share."""
    count = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        count += 1
    return count


class Line:
    """Prompts that come one after the other, into a cache that loses none."""

    def __init__(self):
        self.scene = Scene(make_manager(8000, 0, "write_through", max_tokens=512))
        self.before = []

    def ask(self, pieces):
        """Returns tokens found, and those that the definition allows."""
        tokens, inputs = multimodal_inputs(pieces)
        request = self.scene.add(f"r{len(self.before)}", tokens, 1, inputs)
        assert all(isinstance(each, ImagePosition) for each in request.multimodal_inputs.get("mm_positions", []))
        self.scene.run_dry()
        meaning = list(identities(pieces))
        most = max((shared(meaning, each) for each in self.before), default=0)
        self.before.append(meaning)
        return request.num_cached_tokens, min(most, len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE


def image(color, height=4, width=4):
    return Item(color=color, grid=[1, height, width])


def video(color, frames=4):
    return Item(color=color, grid=[frames, 4, 4])


TEXT = [1, 2, 3, 4]
TAIL = [5] * 9
CASES = {
    "another image": ([TEXT, image(1), TAIL], [TEXT, image(2), TAIL], 0),
    "the same": ([TEXT, image(1), TAIL], [TEXT, image(1), TAIL], 16),
    "another image behind a boundary": ([TEXT, image(1), image(1), TAIL], [TEXT, image(1), image(2), TAIL], 8),
    "an item that ends at a boundary, other text": ([TEXT, image(1), TAIL], [TEXT, image(1), [6] * 9], 8),
    "a boundary's item again, one block later": ([TEXT, image(1), TAIL], [TEXT, TEXT, TEXT, image(1), TAIL], 0),
    "several in a block": ([image(1), image(2), TAIL], [image(1), image(2), TAIL], 16),
    "several in a block, in another order": ([image(1), image(2), TAIL], [image(2), image(1), TAIL], 0),
    "several in a block, the second is another": ([image(1), image(2), TAIL], [image(1), image(3), TAIL], 0),
    "one color, another shape": ([image(1, 4, 8), TAIL], [image(1, 8, 4), TAIL], 0),
    "one color, one image or two": ([image(1, 4, 8), TAIL], [image(1), image(1), TAIL], 0),
    "an image, no image": ([image(1), TAIL], [[IMAGE_TOKEN] * 4, TAIL], 0),
    "a video": ([video(1), TAIL], [video(1), TAIL], 24),
    "another video": ([video(1), TAIL], [video(2), TAIL], 0),
    "a longer video": ([video(1), TAIL], [video(1, frames=8), TAIL], 16),
    "one video or two": ([video(1), TAIL], [video(1, frames=2), video(1, frames=2), TAIL], 8),
}
"""First prompt, second prompt, tokens that the second finds: FastDeploy cuts videos into items of two frames."""


def random_pieces(rng):
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.4:
            yield image(rng.randrange(2), *rng.choice([(2, 2), (4, 4), (2, 8), (8, 2), (4, 8), (8, 4)]))
        elif kind < 0.5:
            yield video(rng.randrange(2), frames=rng.choice([2, 4, 6]))
        else:
            yield [rng.choice([1, IMAGE_TOKEN])] * rng.choice([1, 3, 4, 7, 8])
    yield [5]


@pytest.mark.parametrize(("first", "second", "expected"), CASES.values(), ids=CASES)
def test_a_prompt_finds_what_has_its_text_its_items_and_their_shapes(first, second, expected):
    line = Line()
    assert line.ask(first)[0] == 0
    assert line.ask(second) == (expected, expected)


def test_random_prompts_find_what_the_definition_allows():
    rng, line = random.Random(1), Line()
    hits = with_items = 0
    for _ in range(200):
        pieces = list(random_pieces(rng))
        found, allowed = line.ask(pieces)
        assert found == allowed, pieces
        hits += found > 0
        with_items += found > 0 and any(isinstance(piece, Item) for piece in pieces)
    assert min(hits, with_items) > 40
