"""Block hashes: the names under which computed KV is found again.

A block's hash is SHA-256 over its parent's digest, its token ids as 4-byte little-endian integers, and its extra keys.
So equal hashes mean an equal whole prefix, and two runs of blocks are equal if their last hashes are.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..contract.messages import BlockHash, CacheAccess
from ..contract.sessions import UNTOLD, SessionHint
from ..errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HASH_VERSION = b"fastdeploy-kvcache-v1/1"
TOKEN_BYTES = 4
TOKEN_TYPE = "I" if array("I").itemsize == TOKEN_BYTES else "L"
TOKENS_ARE_SWAPPED = sys.byteorder != "little"
MAX_TOKEN_ID = 2**32 - 1
MAX_NUM_TOKENS = 2**63 - 1
FULL_ACCESS = CacheAccess()
ROWS = b"rows of "
"""Prefix of the key that `rows` gives. No key of an item begins with it: as a number it exceeds any offset."""


class MultimodalItem(NamedTuple):
    """An image, video or audio whose embeddings replace the tokens `[offset, offset + length)`."""

    offset: int
    length: int
    hash: str
    """Content hash; equal hashes mean equal embeddings."""


def root_hash(*, salt: bytes = b"", lora: str = "") -> BlockHash:
    """Return the parent of every first block. Different tenants (`salt`) or adapters (`lora`) never share blocks."""
    name = _text_bytes(lora)
    fields = (HASH_VERSION, salt, name)
    return BlockHash(sha256(b"".join(struct.pack("<Q", len(part)) + part for part in fields)).digest())


def get_block_hash_extra_keys(
    start: int, end: int, items: Sequence[MultimodalItem], first: int = 0
) -> tuple[bytes, int]:
    """Return the extra hash keys of the block of tokens `[start, end)`, and the index of the next block's first item.

    `items` are sorted by offset and do not overlap; items before index `first` end before this block. An item belongs
    to a block that has at least one of its tokens. The key has the item's offset relative to the block, because the
    same placeholders one position later have other embeddings. O(items overlapping the block).
    """
    while first < len(items) and items[first].offset + items[first].length <= start:
        first += 1
    keys = []
    for position in range(first, len(items)):
        item = items[position]
        if item.offset >= end:
            break
        content = _text_bytes(item.hash)
        keys.append(struct.pack("<qQQ", item.offset - start, item.length, len(content)) + content)
    return b"".join(keys), first


class BlockHasher:
    """Hashes a request's tokens block by block as they arrive, in O(new tokens) per call. Not thread-safe.

    Implements `messages.BlockHashes`. Raises `ConfigError`, hashing nothing, for items that overlap or are malformed,
    and for token ids outside 0..2**32-1. `rows(start, end)` returns any further key on which the KV of these tokens
    depends, or empty bytes.
    """

    def __init__(
        self,
        block_size: int,
        *,
        items: Sequence[MultimodalItem] = (),
        rows: Callable[[int, int], bytes] | None = None,
        salt: bytes = b"",
        lora: str = "",
        access: CacheAccess = FULL_ACCESS,
        session: SessionHint = UNTOLD,
    ) -> None:
        self.access = access
        self.session = session
        self.hashes: list[BlockHash] = []
        self._block_size = block_size
        self._items = _checked(items)
        self._rows = rows
        self._num_plain = 0 if salt or lora else MAX_NUM_TOKENS
        self._next_item = 0
        self._parent = root_hash(salt=salt, lora=lora)
        self._partial = b""
        """Token bytes of the last block, which is not full."""

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) * self._block_size + len(self._partial) // TOKEN_BYTES

    @property
    def num_plain_blocks(self) -> int:
        return min(self._num_plain, len(self.hashes))

    def extend(self, token_ids: npt.NDArray[np.integer] | Sequence[int]) -> None:
        """Append tokens (1-D, any integer dtype)."""
        data = self._partial + token_bytes(token_ids)
        step = self._block_size * TOKEN_BYTES
        full = len(data) - len(data) % step
        self._partial = data[full:]
        if not full:
            return
        parent, extra, append = self._parent, b"", self.hashes.append
        has_extra = self._next_item < len(self._items) or self._rows is not None
        for begin in range(0, full, step):
            if has_extra:
                extra = self._extra_keys()
            parent = sha256(parent + data[begin : begin + step] + extra).digest()  # type: ignore[assignment]
            append(parent)
        self._parent = parent

    def _extra_keys(self) -> bytes:
        block = len(self.hashes)
        start, end = block * self._block_size, (block + 1) * self._block_size
        keys, self._next_item = get_block_hash_extra_keys(start, end, self._items, self._next_item)
        if self._rows is not None and (rows := self._rows(start, end)):
            keys += ROWS + rows
        if keys:
            self._num_plain = min(self._num_plain, block)
        return keys


class GivenHashes:
    """A token sequence whose block hashes are known, for example from a trace. Implements `messages.BlockHashes`."""

    num_plain_blocks = 0
    """0, because the keys behind the hashes are unknown."""

    access = FULL_ACCESS

    def __init__(self, hashes: Sequence[BlockHash], num_tokens: int, session: SessionHint = UNTOLD) -> None:
        self.hashes = hashes
        self.num_tokens = num_tokens
        self.session = session


def token_bytes(token_ids: npt.NDArray[np.integer] | Sequence[int]) -> bytes:
    """Encode token ids as 4-byte little-endian unsigned integers. Raises `ConfigError` for ids that do not fit."""
    if isinstance(token_ids, list) and not TOKENS_ARE_SWAPPED:  # four times as fast as through NumPy
        with suppress(TypeError, OverflowError):  # not an integer, or out of range: refused below
            return array(TOKEN_TYPE, token_ids).tobytes()
    # Imported here: the scheduler half must load fast, and a caller that passes an array has loaded NumPy already.
    import numpy as np

    ids = np.asarray(token_ids)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID:
        raise ConfigError(f"token ids must be a 1-D sequence of integers in 0..{MAX_TOKEN_ID}")
    return ids.astype("<u4", copy=False).tobytes()


def _text_bytes(text: str) -> bytes:
    """Encode any text, even half of a surrogate pair, which clients may send. Different texts give different bytes."""
    return text.encode("utf-8", "surrogatepass")


def _checked(items: Sequence[MultimodalItem]) -> tuple[MultimodalItem, ...]:
    """Sort `items` by offset. Raises `ConfigError` naming the first wrong one."""
    for item in items:
        if type(item.offset) is not int or type(item.length) is not int or not isinstance(item.hash, str):
            raise ConfigError(f"a multimodal item needs an integer offset and length and a text as hash, got {item!r}")
        if item.offset < 0 or item.length < 1 or item.offset + item.length > MAX_NUM_TOKENS:
            raise ConfigError(f"multimodal item at offset {item.offset} with length {item.length}: must cover a token")
    ordered = tuple(sorted(items))
    for before, after in pairwise(ordered):
        if before.offset + before.length > after.offset:
            raise ConfigError(f"multimodal items at offsets {before.offset} and {after.offset} overlap")
    return ordered
