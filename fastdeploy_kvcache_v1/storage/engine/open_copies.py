"""OpenCopies: which swap steps still copy, so that storage touches no host slot that a copy reads or fills."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Sequence

from ...contract.messages import SWAP_OUT, SwapStep, WorkerReport

__all__ = ["OpenCopies"]

NEVER = sys.maxsize
"""A step that is not told."""


class OpenCopies:
    """Follows the steps that the workers were told, and their reports. O(copies) each; not thread-safe.

    A report may make up for earlier ones that were lost, and steps may get lost on their way to the workers: a later
    step that was received is what tells that an earlier one does not copy any more.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ended_through = [-1] * num_ranks
        self._told = -1
        self._open: OrderedDict[int, Sequence[int]] = OrderedDict()
        """Host slots that copies of a step fill, by step, until all ranks have ended it. None if a copy failed."""
        self._last_filled: dict[int, int] = {}
        """Which step was the last to fill a host slot."""

    def told(self, step: SwapStep) -> None:
        """The workers are being told of `step`."""
        self._told = step.step
        if step:
            slots = self._open[step.step] = step.swap_out.target_slots
            self._last_filled.update(dict.fromkeys(slots, step.step))

    def reported(self, rank: int, report: WorkerReport) -> list[tuple[int, Sequence[int]]]:
        """The steps that have ended on all ranks now, in order: for each its number, and the host slots, in order, that
        it has filled on all of them and that no later step fills.
        """
        for result in report.transfers:
            if (result.source, result.target) == SWAP_OUT and not result.ok and result.step in self._open:
                self._open[result.step] = ()
        self._ended_through[rank] = max(self._ended_through[rank], report.ended_through)
        through = min(self._ended_through)
        filled: list[tuple[int, Sequence[int]]] = []
        while self._open and next(iter(self._open)) <= through:
            step, slots = self._open.popitem(last=False)
            still = self.still_filled(step, slots)
            filled.append((step, [slot for slot in slots if slot in still]))
        return filled

    def still_filled(self, step: int, slots: Collection[int]) -> frozenset[int]:
        """Those of host `slots` that no step after `step` fills."""
        return frozenset(slot for slot in slots if self._last_filled.get(slot) == step)

    def is_filled(self, slot: int) -> bool:
        """The last copy into a host slot has ended on all ranks, and is not known to have failed."""
        step = self._last_filled.get(slot)
        return step is not None and self.have_ended(step)

    @property
    def last_told(self) -> int:
        """The last step that the workers were told of; -1 for none."""
        return self._told

    def have_ended(self, step: int) -> bool:
        """Every copy up to `step` has ended, on all ranks, and was reported."""
        return step <= self._told and next(iter(self._open), self._told + 1) > step

    def forget_filled(self, through: int | None) -> None:
        """What the open steps up to `through` (None: all) fill is not wanted, or is perhaps never filled."""
        for step, slots in self._open.items():
            if through is None or step <= through:
                self._last_filled.update(dict.fromkeys(self.still_filled(step, slots), NEVER))
                self._open[step] = ()
