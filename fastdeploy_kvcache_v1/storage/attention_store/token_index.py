"""TokenIndex: what the store's index was told that this server has, and what it must be told next.

An index outside finds the server that has a prefix. It names blocks by token ids, the cache by hashes: so the token ids
of every block that was announced are kept here, until the block is gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...contract.messages import BlockHash, CacheEvent, CacheLevel
from ...scheduler.block_hashing import TOKEN_TYPE
from ..engine.target import Prefix

__all__ = ["Statement", "TokenIndex"]


class Statement(NamedTuple):
    """This server has, or has lost, the blocks of a path from block `first` on."""

    token_ids: tuple[int, ...]
    """From the root to the last block that the statement is about."""
    first: int
    exists: bool


class _Announced(NamedTuple):
    parent: BlockHash | None
    token_ids: array[int]
    """Of this block: as numbers of four bytes, for there are as many of them as cached tokens."""


class TokenIndex:
    """Follows the events of a cache manager. Not thread-safe."""

    def __init__(self) -> None:
        self._tiers: dict[BlockHash, set[CacheLevel]] = {}
        """Of every cached block, announced or not."""
        self._announced: dict[BlockHash, _Announced] = {}

    def update(self, events: Iterable[CacheEvent], ended: Iterable[Prefix], block_size: int) -> list[Statement]:
        """Take over what happened since the last call; returns what the index must be told, in order.

        `events` are all of them, up to a moment at which no copy is decided that was not handed over; `ended` are the
        prompts of requests that have ended. O(blocks named), and for a block that is gone O(its path).
        """
        statements = list(self._gone(self._apply(events)))
        for prefix in ended:
            num_cached = 0
            while num_cached < len(prefix.hashes) and prefix.hashes[num_cached] in self._tiers:
                self._announce(prefix, num_cached, block_size)
                num_cached += 1
            if num_cached:
                statements.append(Statement(prefix.token_ids[: num_cached * block_size], 0, exists=True))
        return statements

    def __len__(self) -> int:
        """Announced blocks."""
        return len(self._announced)

    def _announce(self, prefix: Prefix, index: int, block_size: int) -> None:
        block = prefix.hashes[index]
        if block not in self._announced:
            parent = prefix.hashes[index - 1] if index else None
            token_ids = array(TOKEN_TYPE, prefix.token_ids[index * block_size : (index + 1) * block_size])
            self._announced[block] = _Announced(parent, token_ids)

    def _apply(self, events: Iterable[CacheEvent]) -> Sequence[BlockHash]:
        """Returns the announced blocks that are in no tier any more."""
        touched: set[BlockHash] = set()
        for event in events:
            if event.level is None:
                touched.update(self._announced)
                self._tiers.clear()
            elif event.kind == "stored":
                for block in event.hashes:
                    self._tiers.setdefault(block, set()).add(event.level)
            else:
                touched.update(event.hashes)
                for block in event.hashes:
                    tiers = self._tiers[block]
                    tiers.discard(event.level)
                    if not tiers:
                        del self._tiers[block]
        return [block for block in touched if block in self._announced and block not in self._tiers]

    def _gone(self, blocks: Sequence[BlockHash]) -> Iterable[Statement]:
        """One statement for each path that ends in one of `blocks`; what hung below a block is gone as well."""
        gone = set(blocks)
        inner = {self._announced[block].parent for block in gone}
        for last in [block for block in blocks if block not in inner]:
            path, num_gone = [], 0
            block: BlockHash | None = last
            while block is not None:
                path.append(self._announced[block].token_ids)
                num_gone += block in gone
                block = self._announced[block].parent
            token_ids = tuple(token for part in reversed(path) for token in part)
            yield Statement(token_ids, len(path) - num_gone, exists=False)
        for block in gone:
            del self._announced[block]
