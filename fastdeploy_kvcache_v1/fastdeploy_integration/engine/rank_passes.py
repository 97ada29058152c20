"""RankPasses: which forward passes still run inside FastDeploy, as the worker ranks tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ...contract.messages import PassProgress
from ...storage.engine.open_passes import Passes


@dataclass(frozen=True)
class _Doubt:
    """Until it is over, nothing is known of a rank's rows."""

    step: int
    """The first one after it: a rank that has taken it knows which rows there are. -1: no step tells."""
    told: int
    since: float

    def is_over(self, progress: PassProgress) -> bool:
        if 0 <= self.step <= progress.step:
            return True
        # An idle rank has no rows. But batches that it did not get must not be on their way.
        return progress.is_idle and progress.step >= self.told and progress.at >= self.since


class RankPasses(Passes):
    """A slot that was free at a time, after a step, is used by no pass when every rank says that it had taken the step,
    and that what it had submitted by then has ended. Not thread-safe.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = -1
        self._progress: list[PassProgress | None] = [None] * num_ranks
        self._doubts: list[_Doubt | None] = [None] * num_ranks

    def told(self, step: int, *, computes: bool) -> None:
        self._told = step

    def reported(self, rank: int, progress: PassProgress) -> None:
        """The last that `rank` has said."""
        self._progress[rank] = progress
        doubt = self._doubts[rank]
        if doubt is not None and doubt.is_over(progress):
            self._doubts[rank] = None

    def doubt(self, *, rows_stay: bool = False) -> None:
        """The engine gives slots to others although the workers were not told of it, or not for certain: a batch was
        lost, or requests were dropped. They know with the next step. `rows_stay`: not even then, for what was dropped
        computes on; only a rank that is idle has certainly ended it.
        """
        for rank, before in enumerate(self._doubts):
            is_lasting = rows_stay or (before is not None and before.step < 0)
            self._doubts[rank] = _Doubt(-1 if is_lasting else self._told + 1, self._told, self._clock())

    @property
    def are_doubted(self) -> bool:
        return any(doubt is not None for doubt in self._doubts)

    def have_ended(self, step: int, since: float) -> bool:
        if self.are_doubted:
            return False
        return all(each is not None and each.step >= step and each.at >= since for each in self._progress)
