from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.scheduler.block_hashing import (
    BlockHasher,
    GivenHashes,
    MultimodalItem,
    root_hash,
    token_bytes,
)

tokens_strategy = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def reference(block_size: int, tokens: list[int]) -> list[bytes]:
    """The definition, written out."""
    parent, hashes = root_hash(), []
    for end in range(block_size, len(tokens) + 1, block_size):
        body = b"".join(struct.pack("<I", token) for token in tokens[end - block_size : end])
        parent = hashlib.sha256(parent + body).digest()  # type: ignore[assignment]
        hashes.append(parent)
    return hashes


@given(st.integers(1, 9), st.lists(tokens_strategy, max_size=6))
def test_any_cut_of_the_tokens_gives_the_defined_hashes(block_size: int, parts: list[list[int]]) -> None:
    hasher = BlockHasher(block_size)
    for number, part in enumerate(parts):
        hasher.extend(np.array(part, dtype=np.int64) if number % 2 else part)
    tokens = [token for part in parts for token in part]
    assert hasher.hashes == reference(block_size, tokens)
    assert hasher.num_tokens == len(tokens)


def test_names_of_text_stay_as_they_are() -> None:
    """What other servers have stored is found by them."""
    hasher = BlockHasher(64)
    hasher.extend(range(128))  # type: ignore[arg-type]
    assert [each.hex()[:16] for each in hasher.hashes] == ["d2a09c05c1683edc", "af47b5bc3487ffe9"]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "uint32", ">i8", ">u4"])
def test_the_dtype_and_byte_order_of_the_array_do_not_matter(dtype: str) -> None:
    hasher = BlockHasher(4)
    hasher.extend(np.arange(12).astype(dtype))
    assert hasher.hashes == reference(4, list(range(12)))


@pytest.mark.parametrize(
    "bad", [[-1], [2**32], [1.5], ["7"], [[1]], np.array([[3]]), [0, -1], [0, 2**32], [0.5, 1.0], [[1, 2]], ["a", "b"]]
)
def test_tokens_that_do_not_fit_change_nothing(bad: list[object]) -> None:
    hasher = BlockHasher(2)
    hasher.extend([7])
    with pytest.raises(ConfigError):
        hasher.extend(bad)  # type: ignore[arg-type]
    assert hasher.num_tokens == 1
    assert hasher.hashes == []


def test_salt_and_lora_separate_requests_and_cannot_be_confused() -> None:
    roots = {
        root_hash(),
        root_hash(salt=b"a"),
        root_hash(lora="a"),
        root_hash(salt=b"a", lora="b"),
        root_hash(salt=b"ab"),
        root_hash(lora="ab"),
    }
    assert len(roots) == 6


# ---- multimodal items: block size 4, so blocks are [0,4), [4,8), ...


def overlapping(start: int, end: int, items: list[MultimodalItem]) -> bytes:
    """The definition: every item with at least one token in the block."""
    keys = b""
    for item in items:
        if any(start <= token < end for token in range(item.offset, item.offset + item.length)):
            name = item.hash.encode()
            keys += struct.pack("<qQQ", item.offset - start, item.length, len(name)) + name
    return keys


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6), st.integers(1, 5))
def test_extra_keys_follow_the_definition(gaps: list[tuple[int, int]], block_size: int) -> None:
    items, end = [], 0
    for gap, length in gaps:
        items.append(MultimodalItem(end + gap, length, str(len(items))))
        end += gap + length
    tokens = list(range(end + block_size))
    hasher = BlockHasher(block_size, items=items[::-1])
    for token in tokens:
        hasher.extend((token,))
    parent: bytes = root_hash()
    for block, digest in enumerate(hasher.hashes):
        start, stop = block * block_size, (block + 1) * block_size
        parent = hashlib.sha256(parent + token_bytes(tokens[start:stop]) + overlapping(start, stop, items)).digest()
        assert digest == parent


@pytest.mark.parametrize(
    "items",
    [[MultimodalItem(0, 3, "a"), MultimodalItem(2, 1, "b")], [MultimodalItem(-1, 2, "a")], [MultimodalItem(0, 0, "a")]],
)
def test_impossible_items_are_refused(items: list[MultimodalItem]) -> None:
    with pytest.raises(ConfigError):
        BlockHasher(4, items=items)


HALF = "\ud800"


@pytest.mark.parametrize("make", [lambda text: {"items": [MultimodalItem(0, 4, text)]}, lambda text: {"lora": text}])
def test_any_text_is_hashed_and_texts_that_differ_have_different_hashes(make) -> None:  # type: ignore[no-untyped-def]
    """Clients may send half of a surrogate pair, which has no UTF-8."""
    digests = set()
    for text in ("", "a", HALF, HALF + "\udc00", "\U00010000", "\udc00"):
        hasher = BlockHasher(4, **make(text))
        hasher.extend(range(4))  # type: ignore[arg-type]
        digests.add(hasher.hashes[0])
    assert len(digests) == 6


@pytest.mark.parametrize("item", [(0, 4, None), (0, 4, b"x"), ("0", 4, "x"), (0, 4.0, "x"), (0, 2**63, "x")])
def test_malformed_items_are_refused_before_anything_is_hashed(item) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="multimodal item"):
        BlockHasher(4, items=[MultimodalItem(*item)])


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, 4),
        ({"salt": b"tenant"}, 0),
        ({"lora": "adapter"}, 0),
        ({"items": [MultimodalItem(9, 2, "image")]}, 2),
        ({"items": [MultimodalItem(0, 2, "image")]}, 0),
        ({"items": [MultimodalItem(99, 2, "image")]}, 4),
    ],
)
def test_blocks_are_plain_as_far_as_token_ids_alone_decide_their_names(options, plain) -> None:
    hasher = BlockHasher(4, **options)
    hasher.extend(range(17))
    assert hasher.num_plain_blocks == plain
    plainly = BlockHasher(4)
    plainly.extend(range(17))
    assert hasher.hashes[:plain] == plainly.hashes[:plain]
    assert not set(hasher.hashes[plain:]) & set(plainly.hashes)


@given(st.sets(st.integers(0, 6)), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=3))
def test_keys_that_rows_return_for_a_block_are_part_of_its_hash(marked: set[int], gaps: list[tuple[int, int]]) -> None:
    items, end = [], 0
    for gap, length in gaps:
        items.append(MultimodalItem(end + gap, length, "i"))
        end += gap + length
    hasher = BlockHasher(4, items=items, rows=lambda start, end: b"r" * end if start // 4 in marked else b"")
    parent, first = root_hash(), 7
    for block in range(7):
        start, stop = block * 4, block * 4 + 4
        hasher.extend(range(start, stop))  # type: ignore[arg-type]
        extra = overlapping(start, stop, items) + (b"rows of " + b"r" * stop if block in marked else b"")
        first = min(first, block) if extra else first
        parent = hashlib.sha256(parent + token_bytes(range(start, stop)) + extra).digest()  # type: ignore[assignment]
        assert hasher.hashes[block] == parent
    assert hasher.num_plain_blocks == first


def test_given_hashes_have_no_plain_blocks() -> None:
    assert GivenHashes([BlockHash(b"a")], 2).num_plain_blocks == 0
