"""Where everything of one batch lies: the index arithmetic of a forward pass, done once for all layers. NumPy only.

The keys that a token looks at are padded to a multiple of `SEGMENT` that follows from its position alone. Tokens of
one sequence that share them are a bucket, and attention runs per bucket:

    keys       [0 .......................... head)[head ...... head + SEGMENT)
    bucket                                        its positions all lie here
    validity   all valid for every row            causal mask

With a sliding window the keys begin at the segment that the window of the bucket's segment reaches.

So the lengths over which a token's sums run depend on its position only: not on the batch, not on how the prompt was
cut, not on what was cached. What differs between runs cannot reach it: masked keys (probability exactly 0), and how
many rows a matrix product has beside the token's own. That the latter cannot reach it is a promise of the math
library which `row_probe` checks; where it does not hold, the rows are cut into `FIXED_TILES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .vision import EmbeddedRows

SEGMENT = 128
"""Keys are padded to a multiple of it."""


@dataclass(frozen=True)
class RowCut:
    """How many rows the math library gets at a time. `align` divides `attention`, which divides `SEGMENT`."""

    align: int
    """A slice is padded to positions that are multiples of it."""
    attention: int
    """Positions that attention computes together at most."""
    linear: int
    """Rows that the rest of a layer computes together at most."""
    logits: int
    """Rows whose logits are computed together at most."""


ANY_ROWS = RowCut(align=1, attention=SEGMENT, linear=256, logits=256)
"""For a library whose result for a row does not depend on the other rows. More rows would leave the L2 cache."""

FIXED_TILES = RowCut(align=8, attention=8, linear=8, logits=1)
"""For any library: the token at position `p` is row `p % 8` of 8, whatever else is computed. Many times slower."""

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
    num_drafts: int = 0
    """Last tokens that are guesses; see `mtp`."""
    embedded: Sequence[EmbeddedRows] = ()
    """Tokens whose embeddings are given: placeholders of images."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class DraftSlice:
    """A slice of a step with drafts."""

    sequence: SequenceSlice
    """Its last `num_drafts` tokens are guesses."""
    next_token: int | None
    """The token behind the slice where it is known; None where it is to be chosen."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive rows of one sequence that look at the same padded keys."""

    rows: range
    """In the batch's numbering."""
    first: int
    """Place of the first row within the last segment: row `i` may look at that segment's keys up to `first + i`."""
    cache_rows: Index
    """`[num_kv_heads * n]`: rows of a cache tensor, by key-value head; n is a multiple of `SEGMENT`."""


@dataclass(frozen=True)
class BatchPlan:
    """A batch of slices, one row per token or padding token.

    A row of the rotated projections is split into `heads_per_row` heads: "head rows" count those.
    """

    token_ids: Index
    """`[rows]`, padded with token 0."""
    positions: Index
    """`[rows]`, also of the padding."""
    rows: Index
    """`[tokens]`: rows of the slices' tokens, slice by slice."""
    query_rows: Index
    """`[rows * num_heads]`: head rows of the queries, by bucket, then head, then row of the bucket."""
    attention_rows: Index
    """`[rows * num_heads]`: the way back from that order to rows, then heads."""
    key_rows: Index
    """`[tokens * num_kv_heads]`: head rows of the new keys; values, if any, come `num_kv_heads` rows later."""
    cache_rows: Index
    """`[tokens * num_kv_heads]`: where they go in a cache tensor."""
    buckets: list[Bucket]
    embedded: list[EmbeddedRows]
    """In rows of the batch."""
    last_rows: list[int | None]
    """Row of each slice's last token where logits are asked for."""

    @classmethod
    def build(
        cls, slices: Sequence[SequenceSlice], config: ModelConfig, cut: RowCut, *, num_blocks: int, block_size: int
    ) -> BatchPlan:
        """Raises `ValueError` for a slice that does not fit the model, its block table or the cache."""
        for sequence in slices:
            _check(sequence, config, num_blocks, block_size)
        spans = [_padded(sequence, cut) for sequence in slices]
        offsets = np.cumsum([0, *map(len, spans)]).tolist()
        # Row of the batch that position 0 of the sequence would have.
        origins = [offset - span.start for offset, span in zip(offsets, spans, strict=False)]
        rows = np.concatenate([np.arange(s.start, s.end) + o for s, o in zip(slices, origins, strict=True)])
        token_ids = np.zeros(offsets[-1], dtype=np.int64)
        token_ids[rows] = np.concatenate([s.token_ids for s in slices])
        buckets = [
            bucket
            for s, span, origin in zip(slices, spans, origins, strict=True)
            for bucket in _buckets(s, span, origin, config, cut, block_size)
        ]
        heads_per_row = config.heads_per_row
        heads, kv_heads = np.arange(config.num_heads)[:, None], np.arange(config.num_kv_heads)
        key_rows = (rows * heads_per_row + config.num_heads)[:, None] + kv_heads
        query_rows = np.concatenate([(np.array(b.rows) * heads_per_row + heads).ravel() for b in buckets])
        caches = [_cache_rows(s, s.start, s.end, config, block_size).T for s in slices]
        return cls(
            token_ids=token_ids,
            positions=np.concatenate([np.array(span) for span in spans]),
            rows=rows,
            query_rows=query_rows,
            attention_rows=np.argsort(query_rows),
            key_rows=key_rows.ravel(),
            cache_rows=np.concatenate([cache.ravel() for cache in caches]),
            buckets=buckets,
            embedded=[
                EmbeddedRows(s.start + origin + given.first, given.values)
                for s, origin in zip(slices, origins, strict=True)
                for given in s.embedded
            ],
            last_rows=[s.end - 1 + o if s.needs_logits else None for s, o in zip(slices, origins, strict=True)],
        )


def _padded(sequence: SequenceSlice, cut: RowCut) -> range:
    """Positions to compute for the slice."""
    return range(sequence.start // cut.align * cut.align, -(-sequence.end // cut.align) * cut.align)


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


def _buckets(
    sequence: SequenceSlice, span: range, origin: int, config: ModelConfig, cut: RowCut, block_size: int
) -> list[Bucket]:
    """Cut the positions `span` of the slice at multiples of `cut.attention`; position 0 would be row `origin`."""
    rows = _cache_rows(sequence, 0, sequence.end, config, block_size)
    # Padding keys point at a token that is computed now: it holds valid, finite data, unlike unwritten slots, which may
    # hold anything. The mask takes them out of the result.
    rows = np.concatenate([rows, np.repeat(rows[:, -1:], -sequence.end % SEGMENT, axis=1)], axis=1)
    buckets = []
    for piece in range(span.start // cut.attention, -(-span.stop // cut.attention)):
        first = max(span.start, piece * cut.attention)
        end = min(span.stop, (piece + 1) * cut.attention)
        head = first // SEGMENT * SEGMENT
        seen = rows[:, : head + SEGMENT]
        if config.sliding_window is not None:
            seen = _within_window(seen, head, max(first, sequence.start), config.sliding_window)
        buckets.append(Bucket(rows=range(first + origin, end + origin), first=first - head, cache_rows=seen.ravel()))
    return buckets


def _within_window(rows: Index, head: int, first: int, window: int) -> Index:
    """Of the cache rows of a bucket in the segment at `head`, those that any token of that segment looks at.

    Those behind the window of position `first` are masked for all rows, and may lie in blocks that are given away:
    the row of `first` itself stands for them.
    """
    low = max(0, head - window + 1) // SEGMENT * SEGMENT
    behind = max(0, first - window + 1 - low)
    rows = rows[:, low:].copy()
    rows[:, :behind] = rows[:, first - low : first - low + 1]
    return rows
