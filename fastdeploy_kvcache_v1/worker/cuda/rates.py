"""Which ways to copy a GPU has, and which one is the fastest for a copy: what `trial.py` found, as a table.

No model of a GPU: each way was timed at the row sizes of this cache, with blocks that lie apart and blocks that are
neighbours, in both directions; a copy between those takes what is between their times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from typing import NamedTuple

from ...contract.messages import CopyPath

KERNEL, BATCH, SPANS = WAYS = ("kernel", "batch", "spans")
"""One kernel; one cuMemcpyBatchAsync; a cuMemcpy2DAsync for each span, which works everywhere."""

JOINED = 16
"""Blocks of one span, where neighbours were timed."""


class Timing(NamedTuple):
    """What a block's row of `row_bytes` takes, in ns: until it is there, and half of the submitting thread's time."""

    row_bytes: int
    apart: float
    """In a span of its own."""
    joined: float
    """In a span of `JOINED` blocks."""

    def of_copy(self, blocks: int, spans: int) -> float:
        """Linear in both."""
        of_span = max(0.0, self.apart - self.joined) * JOINED / (JOINED - 1)
        return max(0.0, self.apart - of_span) * blocks + of_span * spans


@dataclass(frozen=True)
class Rates:
    """What was found. A way that is not in `timings` is not used, `RUNS` apart where nothing could be tried."""

    timings: Mapping[str, Sequence[Sequence[Timing]]] = field(default_factory=dict)
    """By way: those of copies from the device, and those of copies to it; in the order of row sizes."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Ways that are not used, and why."""
    reach: int = 0
    """Bytes from the first to the last row, up to which a tier was tried. Beyond, only `RUNS` is used."""

    @property
    def ways(self) -> tuple[str, ...]:
        """In the order of preference where times are equal."""
        return tuple(way for way in WAYS if way in self.timings) or (SPANS,)

    def fastest(
        self, row_bytes: Sequence[int], blocks: int, spans: int, *, to_device: bool, among: Collection[str]
    ) -> str:
        """The way for a copy of so many blocks in so many spans, rows of these sizes each."""
        ways = [way for way in self.ways if way in among]
        if len(ways) < 2:
            return ways[0] if ways else SPANS
        return min(ways, key=lambda way: sum(self._time(way, to_device, each, blocks, spans) for each in row_bytes))

    def _time(self, way: str, to_device: bool, row_bytes: int, blocks: int, spans: int) -> float:
        timings = self.timings[way][to_device]
        for low, high in pairwise(timings):
            if low.row_bytes <= row_bytes <= high.row_bytes:
                part = log(row_bytes / low.row_bytes) / log(high.row_bytes / low.row_bytes)
                return low.of_copy(blocks, spans) * (1 - part) + high.of_copy(blocks, spans) * part
        nearest = timings[0] if row_bytes < timings[0].row_bytes else timings[-1]
        return nearest.of_copy(blocks, spans) * max(1.0, row_bytes / nearest.row_bytes)

    def paths(self) -> tuple[CopyPath, ...]:
        """For the metrics: both directions, every way, and why it is not used."""
        named = dict.fromkeys(self.ways, "") | dict(self.left)
        return tuple(CopyPath(direction, *each) for direction in ("in", "out") for each in named.items())

    def describe(self) -> str:
        """One line: the ways that are used, and why the others are not."""
        left = "; ".join(f"{way}: {reason}" for way, reason in self.left.items())
        return ", ".join(self.ways) + (f" (not {left})" if left else "")
