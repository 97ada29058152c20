"""Spans: which bytes of a peer's tensors go where in ours, as a table that no Python loop makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CacheStateError
from .geometry import Geometry, pieces

__all__ = ["Chunk", "Span", "Spans", "require_inside", "spans_of"]

Table = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Neighbouring bytes of one tensor. Both sides count their tensors alike: region = layer * roles + role."""

    region: int
    source_offset: int
    target_offset: int
    num_bytes: int


class Chunk(NamedTuple):
    """Blocks `[first_block, end_block)` of a prompt in layers `[first_layer, end_layer)`."""

    first_block: int
    end_block: int
    first_layer: int
    end_layer: int


@dataclass(frozen=True, eq=False)
class Spans(Sequence[Span]):
    """Immutable. `table` is int64 `[spans, 4]`, its columns as in `Span`."""

    table: Table

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Spans:
        return cls(np.array(spans, dtype=np.int64).reshape(len(spans), 4))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return Spans(self.table[index]) if isinstance(index, slice) else Span(*self.table[index].tolist())

    def __iter__(self) -> Iterator[Span]:
        return map(Span._make, self.table.tolist())

    @property
    def num_bytes(self) -> int:
        return int(self.table[:, 3].sum())

    def coalesced(self) -> Spans:
        """The same bytes in the fewest spans: those that follow each other on both sides become one. O(spans)."""
        table = self.table
        if len(table) < 2:
            return self
        ends = table[:-1, 1:3] + table[:-1, 3:]
        starts = np.flatnonzero((table[1:, 0] != table[:-1, 0]) | (table[1:, 1:3] != ends).any(axis=1)) + 1
        starts = np.concatenate(([0], starts))
        joined = table[starts]
        joined[:, 3] = np.add.reduceat(table[:, 3], starts)
        return Spans(joined)

    def batches(self, *, most_spans: int, most_bytes: int) -> Iterator[Spans]:
        """In order, each with so many spans and bytes at most; a span that alone is larger is cut."""
        table = _cut(self.table, most_bytes)
        ends = np.cumsum(table[:, 3])
        first = 0
        while first < len(table):
            before = int(ends[first - 1]) if first else 0
            end = min(int(np.searchsorted(ends, before + most_bytes, side="right")), first + most_spans)
            yield Spans(table[first:end])
            first = end


def spans_of(
    source: Geometry, target: Geometry, source_slots: Sequence[int], target_slots: Sequence[int], chunk: Chunk
) -> Spans:
    """What `target` reads from `source` for `chunk`: block i of the prompt is in `source_slots[i]` there and goes to
    `target_slots[i]`. Coalesced, layer by layer. Raises `CacheStateError` for a chunk outside the slots or layers.
    """
    if not 0 <= chunk.first_block <= chunk.end_block <= min(len(source_slots), len(target_slots)):
        raise CacheStateError(f"{chunk} is outside {len(source_slots)} source and {len(target_slots)} target slots")
    if not 0 <= chunk.first_layer <= chunk.end_layer <= target.num_layers:
        raise CacheStateError(f"{chunk} is outside {target.num_layers} layers")
    blocks = slice(chunk.first_block, chunk.end_block)
    sources, targets = (np.asarray(slots[blocks], dtype=np.int64) for slots in (source_slots, target_slots))
    per_layer = []
    for piece in pieces(source, target):
        table = np.empty((len(sources), 4), np.int64)
        table[:, 0] = piece.role
        table[:, 1] = sources * source.roles[piece.role].block_bytes + piece.source_offset
        table[:, 2] = targets * target.roles[piece.role].block_bytes + piece.target_offset
        table[:, 3] = piece.num_bytes
        per_layer.append(Spans(table).coalesced().table)
    layer = np.concatenate(per_layer) if per_layer else np.empty((0, 4), np.int64)
    layers = np.arange(chunk.first_layer, chunk.end_layer, dtype=np.int64)
    table = np.tile(layer, (len(layers), 1))
    table[:, 0] += np.repeat(layers * len(target.roles), len(layer))
    return Spans(table)


def require_inside(ranges: Table, region_bytes: Table, what: str) -> None:
    """`ranges`: `[spans, 3]`, region, offset, bytes. Raises `CacheStateError` unless each is inside its region."""
    if not len(ranges):
        return
    regions, offsets, counts = ranges.T
    if regions.min() < 0 or regions.max() >= len(region_bytes):
        raise CacheStateError(f"spans name tensors {regions.min()} to {regions.max()} of {len(region_bytes)}")
    sizes = region_bytes[regions]
    # In this order nothing can overflow.
    if offsets.min() < 0 or counts.min() < 1 or (counts > sizes).any() or (offsets > sizes - counts).any():
        raise CacheStateError(f"spans have {what} bytes outside of a tensor")


def _cut(table: Table, most_bytes: int) -> Table:
    """Spans above `most_bytes` in as many parts as they need."""
    parts = -(-table[:, 3] // most_bytes)
    if (parts <= 1).all():
        return table
    cut = np.repeat(table, parts, axis=0)
    firsts = np.cumsum(parts) - parts
    done = (np.arange(len(cut)) - np.repeat(firsts, parts)) * most_bytes
    cut[:, 1] += done
    cut[:, 2] += done
    cut[:, 3] = np.minimum(cut[:, 3] - done, most_bytes)
    return cut
