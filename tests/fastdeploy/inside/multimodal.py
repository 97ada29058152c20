"""Prompts with images and videos, one after the other, through the real Request and ResourceManagerV1 over our adapter.

What each prompt finds is compared with a definition that knows no blocks and no hashes: two prompts share as many
tokens as are equal in id, item, shape of the item, and place in it.
"""

import random
from itertools import takewhile
from types import SimpleNamespace

import numpy as np

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
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


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


def random_pieces(rng):
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.4:
            shape = rng.choice([(2, 2), (4, 4), (2, 8), (8, 2), (4, 8), (8, 4)])
            yield Item(color=rng.randrange(2), grid=[1, *shape])
        elif kind < 0.5:
            yield Item(color=rng.randrange(2), grid=[rng.choice([2, 4, 6]), 4, 4])
        else:
            yield [rng.choice([1, IMAGE_TOKEN])] * rng.choice([1, 3, 4, 7, 8])
    yield [5]


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
