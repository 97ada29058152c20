"""Where everything of one batch lies: the index arithmetic of a forward pass, done once for all layers. NumPy only.

A sequence is computed in tiles of `TILE` positions aligned to *absolute* positions: the token at position `p` is
always row `p % TILE` of its tile, and every GEMM sees exactly one tile. The keys a tile looks at are padded to a
multiple of `SEGMENT` that follows from the tile's position alone:

    keys       [0 .......................... head)[head ...... head + SEGMENT)
    tile             first = tile * TILE, always within the last segment: [first, first + TILE)
    validity   all valid for every row            causal mask, one of SEGMENT / TILE variants

So the shape of every operation on a token depends on its position only: not on the batch, not on how the prompt was
cut, not on what was cached. What differs between runs are rows and keys that cannot reach it: other rows of its tile
(each row of a GEMM's result depends on that row of its left operand alone) and masked keys (probability exactly 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig

TILE = 8
"""Rows of a tile. Larger tiles prefill big models faster, smaller ones decode faster: a decode pays a whole tile."""

SEGMENT = 128
"""Keys are padded to a multiple of it."""

Index = NDArray[np.int64]


@dataclass(frozen=True)
class SequenceSlice:
    """The tokens of one sequence to compute now."""

    token_ids: NDArray[np.int64]
    """`[n]`, n >= 1."""
    start: int
    """Position of the first of them; the KV of all earlier positions is in the cache."""
    block_table: Sequence[int]
    """Cache blocks of the sequence in order, covering at least `start + n` tokens."""
    needs_logits: bool = True
    """Whether to compute the logits after the last token."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Bucket:
    """Consecutive tiles of one sequence that look at the same padded keys. Indices are rows of a cache tensor."""

    head_rows: Index
    """`[num_kv_heads * head]`: keys valid for every row, by key-value head. Empty for the first segment."""
    tail_rows: Index
    """`[num_kv_heads * SEGMENT]`: keys of the last segment."""
    all_rows: Index
    """`[num_kv_heads * (head + SEGMENT)]`: values."""
    tiles: range
    """Tiles in the batch's numbering."""
    first_variant: int
    """Mask variant of the first tile, `first_position % SEGMENT // TILE`; each following tile has the next one."""


@dataclass(frozen=True)
class BatchPlan:
    """A batch of slices as `num_tiles * TILE` rows, padding included.

    A row of the rotated projections is split into `num_heads + 2 * num_kv_heads` heads: "head rows" count those.
    """

    num_tiles: int
    token_ids: Index
    """`[rows]`, padded with token 0."""
    positions: Index
    """`[rows]`, also of the padding."""
    query_rows: Index
    """`[num_tiles * num_heads * TILE]`: head rows of the queries, by tile, then head, then row of the tile."""
    key_rows: Index
    """`[tokens * num_kv_heads]`: head rows of the new keys."""
    value_rows: Index
    """Like `key_rows`, for the values."""
    cache_rows: Index
    """`[tokens * num_kv_heads]`: where they go in a cache tensor."""
    buckets: list[Bucket]
    last_rows: list[tuple[int, int] | None]
    """Tile, and row in it, of each slice's last token where logits are asked for."""

    @classmethod
    def build(
        cls, slices: Sequence[SequenceSlice], config: ModelConfig, *, num_blocks: int, block_size: int
    ) -> BatchPlan:
        """Raises `ValueError` for a slice that does not fit the model, its block table or the cache."""
        for sequence in slices:
            _check(sequence, config, num_blocks, block_size)
        first_tiles = [sequence.start // TILE for sequence in slices]
        tile_counts = [(s.end - 1) // TILE - first + 1 for s, first in zip(slices, first_tiles, strict=True)]
        offsets = np.cumsum([0, *tile_counts]).tolist()
        num_tiles = offsets[-1]
        positions = np.concatenate(
            [np.arange(count * TILE) + first * TILE for count, first in zip(tile_counts, first_tiles, strict=True)]
        )
        # Row of the batch that position 0 of the sequence would have.
        origins = [(offset - first) * TILE for offset, first in zip(offsets[:-1], first_tiles, strict=True)]
        rows = np.concatenate([np.arange(s.start, s.end) + o for s, o in zip(slices, origins, strict=True)])
        token_ids = np.zeros(num_tiles * TILE, dtype=np.int64)
        token_ids[rows] = np.concatenate([s.token_ids for s in slices])

        heads_per_row = config.num_heads + 2 * config.num_kv_heads
        kv_heads = np.arange(config.num_kv_heads)
        key_rows = (rows * heads_per_row + config.num_heads)[:, None] + kv_heads
        tile_rows = np.arange(num_tiles * TILE).reshape(num_tiles, 1, TILE) * heads_per_row
        caches = [_cache_rows(s, s.start, s.end, config, block_size).T for s in slices]
        return cls(
            num_tiles=num_tiles,
            token_ids=token_ids,
            positions=positions,
            query_rows=(tile_rows + np.arange(config.num_heads)[:, None]).ravel(),
            key_rows=key_rows.ravel(),
            value_rows=key_rows.ravel() + config.num_kv_heads,
            cache_rows=np.concatenate([cache.ravel() for cache in caches]),
            buckets=[
                bucket
                for s, offset in zip(slices, offsets[:-1], strict=True)
                for bucket in _buckets(s, offset, config, block_size)
            ],
            last_rows=[
                divmod(s.end - 1 + origin, TILE) if s.needs_logits else None
                for s, origin in zip(slices, origins, strict=True)
            ],
        )


def _check(sequence: SequenceSlice, config: ModelConfig, num_blocks: int, block_size: int) -> None:
    ids, table = sequence.token_ids, sequence.block_table
    if len(ids) < 1 or sequence.start < 0:
        raise ValueError(f"a slice needs at least one token and a start of at least 0, got {sequence}")
    if sequence.end > config.max_position:
        raise ValueError(f"position {sequence.end - 1} is beyond the model's {config.max_position}")
    if sequence.end > len(table) * block_size:
        raise ValueError(f"{len(table)} blocks of {block_size} do not cover {sequence.end} tokens")
    if min(table) < 0 or max(table) >= num_blocks:
        raise ValueError(f"block ids must be in [0, {num_blocks}), got {min(table)} to {max(table)}")
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(f"token ids must be in [0, {config.vocab_size}), got {int(ids.min())} to {int(ids.max())}")


def _cache_rows(sequence: SequenceSlice, start: int, end: int, config: ModelConfig, block_size: int) -> Index:
    """`[num_kv_heads, end - start]`: rows of a cache seen as `[num_blocks * num_kv_heads * block_size, head_dim]`."""
    positions = np.arange(start, end)
    blocks = np.asarray(sequence.block_table, dtype=np.int64)[positions // block_size]
    heads = np.arange(config.num_kv_heads, dtype=np.int64)[:, None]
    rows: Index = (blocks * config.num_kv_heads + heads) * block_size + positions % block_size
    return rows


def _buckets(sequence: SequenceSlice, tile_offset: int, config: ModelConfig, block_size: int) -> list[Bucket]:
    """Cut the slice's tiles at multiples of `SEGMENT`; the first of them is tile `tile_offset` of the batch."""
    first, last = sequence.start // SEGMENT, (sequence.end - 1) // SEGMENT
    rows = _cache_rows(sequence, 0, sequence.end, config, block_size)
    # Padding keys point at position 0: it holds valid, finite data for every sequence, unlike unwritten slots, which
    # may hold anything. The mask takes them out of the result.
    padding = (last + 1) * SEGMENT - sequence.end
    rows = np.concatenate([rows, np.repeat(rows[:, :1], padding, axis=1)], axis=1)
    buckets = []
    for segment in range(first, last + 1):
        head = segment * SEGMENT
        begin = max(head, sequence.start // TILE * TILE)
        end = min(head + SEGMENT, sequence.end)
        count = (end - 1) // TILE - begin // TILE + 1
        buckets.append(
            Bucket(
                head_rows=rows[:, :head].ravel(),
                tail_rows=rows[:, head : head + SEGMENT].ravel(),
                all_rows=rows[:, : head + SEGMENT].ravel(),
                tiles=range(tile_offset, tile_offset + count),
                first_variant=begin % SEGMENT // TILE,
            )
        )
        tile_offset += count
    return buckets
