"""CopiesByStep: where the blocks are now that recent steps copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..contract.messages import BlockHash, CacheLevel, HostSlot
from .run import HOST, WIDTH, Run

REMEMBERED_STEPS = 256
"""Steps with copies that are remembered. If an older one fails, the whole cache is searched for its blocks."""


class CopiedRun:
    """Blocks of a run that had an open copy when a step was taken.

    Blocks keep their place in their cells when runs are cut or joined; moved cells say where they are. Blocks that are
    still cached are in the run itself or above it. A cut leaves a run the lower part, and the `parent` of a joined run
    is the run that took its blocks.
    """

    __slots__ = ("_cells", "_count", "_first", "_level", "_looked_at", "_run")

    def __init__(self, run: Run) -> None:
        self._run, self._level = run, run.open
        self._cells, self._first, self._count = run.cells, run.start, run.length
        self._looked_at = 0
        """Leading blocks that `take` has passed: a copy is stored piece by piece, in order."""

    def parts(self) -> list[tuple[Run, int, int]]:
        """List the runs that hold its blocks, in prompt order, with their ranges of cells. O(runs from there up)."""
        while len(self._cells) == 1:
            self._cells, shift = self._cells[0]
            self._first += shift
        begin, end = self._first, self._first + self._count
        parts, run = [], self._run
        while run.parent is not None:
            if run.cells is self._cells and (run.on_device or run.host is not None):
                if run.start < end and begin < run.end:
                    parts.append((run, max(begin, run.start), min(end, run.end)))
                if run.start <= begin:
                    break
            run = run.parent
        return parts[::-1]

    def take(self, wanted: set[int]) -> list[tuple[BlockHash, HostSlot, BlockHash | None]]:
        """Return its blocks in host slots `wanted`, in prompt order, each with its slot and the hash of the block
        before it, and remove these slots from `wanted`.

        Skips runs that were forgotten or have an open copy. O(blocks looked at), usually only the returned ones. If a
        block left, another copy of the step may have a block in its place: both find it, the first takes it.
        """
        if self._level is not CacheLevel.HOST:
            return []
        parts = [part for part in self.parts() if part[0].host and part[0].open is None and not part[0].detached]
        cells, places, start = self._cells, [], self._looked_at
        for low, high in ((start, self._count), (0, start)):
            for _, first, last in parts:
                for place in range(max(first, self._first + low), min(last, self._first + high)):
                    if not wanted:
                        break
                    slot = cells[WIDTH * place + HOST]
                    if slot in wanted:
                        wanted.remove(slot)
                        places.append(place)
                        self._looked_at = place + 1 - self._first
        top = next((run.parent_hash for run, _, _ in parts if not run.start), None)
        return [
            (cells[WIDTH * place], cells[WIDTH * place + HOST], cells[WIDTH * (place - 1)] if place else top)
            for place in sorted(places)
        ]


class CopiesByStep:
    def __init__(self) -> None:
        self._steps: dict[int, Sequence[CopiedRun]] = {}
        self._last_dropped = -1

    def remember(self, step: int, runs: Iterable[Run]) -> None:
        """Remember `runs`, at least one, whose open copies `step` takes."""
        self._steps[step] = [CopiedRun(run) for run in runs]
        if len(self._steps) > REMEMBERED_STEPS:
            self._last_dropped = next(iter(self._steps))
            del self._steps[self._last_dropped]

    def of(self, step: int) -> Sequence[CopiedRun] | None:
        """Return the copies of `step`; None if that is too long ago."""
        return self._steps.get(step, None if step <= self._last_dropped else ())
