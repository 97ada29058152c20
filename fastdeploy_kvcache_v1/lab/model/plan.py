"""The index arithmetic of a forward pass, done once for all layers. NumPy only.

A token's keys are padded to a multiple of `SEGMENT` that depends on its position alone. Tokens of a sequence with the
same padded keys are a bucket, and attention runs per bucket:

    keys       [0 .......................... head)[head ...... head + SEGMENT)
    bucket                                        its positions all lie here
    validity   all valid for every row            causal mask

So the lengths of a token's sums depend on its position only, not on batch, chunks or hits. Masked keys have a
probability of exactly 0. The math library keeps a row independent of other rows of a product, see `reproducible`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .config import LlamaConfig
from .step import SequenceSlice

SEGMENT = 128
"""Keys are padded to a multiple of it."""

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Bucket:
    """Consecutive rows of a sequence with the same padded keys."""

    rows: range
    """In the batch's numbering."""
    first: int
    """Place of the first row in the last segment: row `i` sees that segment's keys up to `first + i`."""
    cache_rows: Index
    """`[num_kv_heads * n]`: rows of a cache tensor, by key-value head; n is a multiple of `SEGMENT`."""

    def mask(self, group: int) -> NDArray[np.float32]:
        """`[group * rows, SEGMENT]`: 0 where a row sees a key of the last segment, else -inf."""
        positions = np.tile(self.first + np.arange(len(self.rows)), group)
        return np.where(np.arange(SEGMENT) <= positions[:, None], np.float32(0), np.float32(-np.inf))


@dataclass(frozen=True)
class BatchPlan:
    """A batch of slices, one row per token.

    A row of the projections is split into `num_heads + 2 * num_kv_heads` heads, "head rows" count those.
    """

    token_ids: Index
    """`[rows]`"""
    positions: Index
    """`[rows]`"""
    query_rows: Index
    """`[rows * num_heads]`: head rows of the queries, by bucket, then head, then row of the bucket."""
    attention_rows: Index
    """`[rows * num_heads]`: from that order back to rows, then heads."""
    key_rows: Index
    """`[rows * num_kv_heads]`: head rows of the new keys; the values come `num_kv_heads` rows later."""
    cache_rows: Index
    """`[rows * num_kv_heads]`: their rows in a cache tensor."""
    buckets: list[Bucket]
    last_rows: list[int]
    """Row of the last token of each slice that needs logits."""

    @classmethod
    def build(
        cls, slices: Sequence[SequenceSlice], config: LlamaConfig, *, num_blocks: int, block_size: int
    ) -> BatchPlan:
        """Raises `ValueError` for a slice that does not fit the model, its block table or the cache."""
        for sequence in slices:
            _check(sequence, config, num_blocks, block_size)
        token_ids = np.concatenate([s.token_ids for s in slices])
        ends = np.cumsum([len(s.token_ids) for s in slices]).tolist()
        buckets = [
            bucket
            for s, end in zip(slices, ends, strict=True)
            for bucket in _buckets(s, end - s.end, config, block_size)
        ]
        heads_per_row = config.num_heads + 2 * config.num_kv_heads
        heads, kv_heads = np.arange(config.num_heads)[:, None], np.arange(config.num_kv_heads)
        key_rows = (np.arange(len(token_ids)) * heads_per_row + config.num_heads)[:, None] + kv_heads
        query_rows = np.concatenate([(np.array(b.rows) * heads_per_row + heads).ravel() for b in buckets])
        cache_rows = [_cache_rows(s, s.start, s.end, config, block_size).T.ravel() for s in slices]
        return cls(
            token_ids=token_ids,
            positions=np.concatenate([np.arange(s.start, s.end) for s in slices]),
            query_rows=query_rows,
            attention_rows=np.argsort(query_rows),
            key_rows=key_rows.ravel(),
            cache_rows=np.concatenate(cache_rows),
            buckets=buckets,
            last_rows=[end - 1 for s, end in zip(slices, ends, strict=True) if s.needs_logits],
        )


def _check(sequence: SequenceSlice, config: LlamaConfig, num_blocks: int, block_size: int) -> None:
    sequence.check(max_position=config.max_position, num_blocks=num_blocks, block_size=block_size)
    ids = sequence.token_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(f"token ids must be in [0, {config.vocab_size}), got {int(ids.min())} to {int(ids.max())}")
    if sequence.num_drafts:
        raise ValueError(f"the model has no draft layer, got {sequence.num_drafts} guesses")


def _cache_rows(sequence: SequenceSlice, start: int, end: int, config: LlamaConfig, block_size: int) -> Index:
    """`[num_kv_heads, end - start]`: rows of a cache seen as `[num_blocks * num_kv_heads * block_size, head_dim]`."""
    positions = np.arange(start, end)
    blocks = np.asarray(sequence.block_table, dtype=np.int64)[positions // block_size]
    heads = np.arange(config.num_kv_heads, dtype=np.int64)[:, None]
    rows: Index = (blocks * config.num_kv_heads + heads) * block_size + positions % block_size
    return rows


def _buckets(sequence: SequenceSlice, origin: int, config: LlamaConfig, block_size: int) -> list[Bucket]:
    """Cut the slice at multiples of `SEGMENT`; position 0 would be row `origin`."""
    rows = _cache_rows(sequence, 0, sequence.end, config, block_size)
    # Padding keys point at a token that is computed now: it holds valid, finite data, unlike unwritten slots, which may
    # hold anything. The mask takes them out of the result.
    rows = np.concatenate([rows, np.repeat(rows[:, -1:], -sequence.end % SEGMENT, axis=1)], axis=1)
    buckets = []
    for head in range(sequence.start // SEGMENT * SEGMENT, sequence.end, SEGMENT):
        first, end = max(sequence.start, head), min(sequence.end, head + SEGMENT)
        seen = rows[:, : head + SEGMENT].ravel()
        buckets.append(Bucket(rows=range(first + origin, end + origin), first=first - head, cache_rows=seen))
    return buckets
