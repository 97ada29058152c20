"""OpenCopies: which swap steps still copy, so that storage touches no host slot that a copy reads or fills."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...metadata import EVICT, CopyKind, SwapStep, TransferResult

__all__ = ["OpenCopies"]


class OpenCopies:
    """Follows the steps that the workers were told, and their results. O(copies) each; not thread-safe."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: dict[int, dict[CopyKind, int]] = {}
        """Ranks that have not reported, by step and kind of copy."""
        self._told = -1
        self._filled: dict[int, tuple[int, ...]] = {}
        """Host slots that copies of a step fill, until all ranks have."""
        self._last_filled: dict[int, int] = {}
        """Which step was the last to fill a host slot."""
        self._failed: set[int] = set()
        """Steps whose copy to the host failed on a rank."""

    def told(self, step: SwapStep) -> None:
        """The workers are being told of `step`."""
        self._told = step.step
        if not step:
            return
        self._waiting[step.step] = {transfer.kind: self._num_ranks for transfer in step.transfers}
        if slots := step.evict.target_slots:
            self._filled[step.step] = slots
            self._last_filled.update(dict.fromkeys(slots, step.step))

    def reported(self, result: TransferResult) -> Sequence[int]:
        """Returns the host slots that the step has filled on all ranks now, and that no later step fills, in order."""
        kinds = self._waiting.get(result.step)
        kind = (result.source, result.target)
        if kinds is None or kind not in kinds:
            return ()
        kinds[kind] -= 1
        if kind == EVICT and not result.ok:
            self._failed.add(result.step)
        if kinds[kind]:
            return ()
        del kinds[kind]
        if not kinds:
            del self._waiting[result.step]
        if kind != EVICT:
            return ()
        filled = self._filled.pop(result.step)
        if result.step in self._failed:
            self._failed.discard(result.step)
            return ()
        still = self.still_filled(result.step, filled)
        return [slot for slot in filled if slot in still]

    def still_filled(self, step: int, slots: Collection[int]) -> frozenset[int]:
        """Those of host `slots` that no step after `step` fills."""
        return frozenset(slot for slot in slots if self._last_filled.get(slot) == step)

    @property
    def last_told(self) -> int:
        """The last step that the workers were told of; -1 for none."""
        return self._told

    def have_ended(self, step: int) -> bool:
        """Every copy up to `step` has ended, on all ranks, and was reported."""
        oldest = next(iter(self._waiting), self._told + 1)
        return step <= self._told and oldest > step

    def forget(self) -> None:
        """The workers were started again, or stopped copying: nothing told so far will be reported."""
        self._waiting.clear()
        self._filled.clear()
        self._failed.clear()
