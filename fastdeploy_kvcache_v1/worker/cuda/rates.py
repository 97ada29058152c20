"""Rates: the measured times of a GPU's copy paths (`trial.py`), and the fastest path of a copy.

Each path was timed at the cache's row sizes, with scattered and neighbouring blocks, in both directions. Times of other
copies are interpolated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from typing import NamedTuple

from ...contract.messages import CopyPath

KERNEL, BATCH, SPANS = PATHS = ("kernel", "batch", "spans")
"""One kernel; one cuMemcpyBatchAsync; a cuMemcpy2DAsync per span, which works everywhere."""
JOINED = 16
"""Blocks per span where neighbours were timed."""


class Timing(NamedTuple):
    """Cost of one row of `row_bytes`, in ns: time until it has arrived plus half the submitting thread's CPU time; a
    quarter more for swap-ins by the kernel.
    """

    row_bytes: int
    apart: float
    """In a span of its own."""
    joined: float
    """In a span of `JOINED` blocks."""

    def of_copy(self, blocks: int, spans: int) -> float:
        of_span = max(0.0, self.apart - self.joined) * JOINED / (JOINED - 1)
        return max(0.0, self.apart - of_span) * blocks + of_span * spans


@dataclass(frozen=True)
class Rates:
    """Measured paths. A path without `timings` is not used, except `SPANS` where nothing could be tried."""

    timings: Mapping[str, Sequence[Sequence[Timing]]] = field(default_factory=dict)
    """By path: copies from the device, copies to it, each by row size."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Unused paths, with the reason."""
    reach: int = 0
    """Largest tried tier, in bytes from its first to its last row. Larger tiers use `SPANS` only."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Used paths, in order of preference at equal times."""
        return tuple(path for path in PATHS if path in self.timings) or (SPANS,)

    def fastest(
        self, row_bytes: Sequence[int], blocks: int, spans: int, *, to_device: bool, among: Collection[str]
    ) -> str:
        """Choose the path of a copy of `blocks` in `spans`, with rows of `row_bytes`."""
        paths = [path for path in self.paths if path in among]
        if len(paths) < 2:
            return paths[0] if paths else SPANS
        return min(paths, key=lambda path: sum(self._time(path, to_device, each, blocks, spans) for each in row_bytes))

    def _time(self, path: str, to_device: bool, row_bytes: int, blocks: int, spans: int) -> float:
        timings = self.timings[path][to_device]
        for low, high in pairwise(timings):
            if low.row_bytes <= row_bytes <= high.row_bytes:
                part = log(row_bytes / low.row_bytes) / log(high.row_bytes / low.row_bytes)
                return low.of_copy(blocks, spans) * (1 - part) + high.of_copy(blocks, spans) * part
        nearest = timings[0] if row_bytes < timings[0].row_bytes else timings[-1]
        return nearest.of_copy(blocks, spans) * max(1.0, row_bytes / nearest.row_bytes)

    def copy_paths(self) -> tuple[CopyPath, ...]:
        named = dict.fromkeys(self.paths, "") | dict(self.left)
        return tuple(CopyPath(direction, *each) for direction in ("in", "out") for each in named.items())

    def describe(self) -> str:
        left = "; ".join(f"{path}: {reason}" for path, reason in self.left.items())
        return ", ".join(self.paths) + (f" (not {left})" if left else "")
