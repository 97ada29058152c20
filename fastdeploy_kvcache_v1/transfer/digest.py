"""A digest over what was read, made by both sides from their own memory: whatever lies between them is covered."""

from __future__ import annotations

from collections.abc import Sequence

from ..worker.ops.rows import BlockRows
from .socket_source import checksum_of
from .spans import Spans

__all__ = ["source_digest", "target_digest"]


def source_digest(regions: Sequence[BlockRows], spans: Spans) -> int:
    """Over the source bytes of `spans`, in their order: xxh3, 64 bits. CPU memory only."""
    return _digest(regions, spans, 1)


def target_digest(regions: Sequence[BlockRows], spans: Spans) -> int:
    """The same over the target bytes."""
    return _digest(regions, spans, 2)


def _digest(regions: Sequence[BlockRows], spans: Spans, side: int) -> int:
    views = [region.array.reshape(-1).data for region in regions]
    return checksum_of([views[row[0]][row[side] : row[side] + row[3]] for row in spans.table.tolist()])
