"""OpenPasses: which forward passes still run, so that storage touches no device slot that one of them uses."""

from __future__ import annotations

__all__ = ["OpenPasses"]


class OpenPasses:
    """Follows the passes of numbered steps. O(1) each; not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}
        self._told = -1

    def told(self, step: int, *, computes: bool) -> None:
        """The workers are being told of `step`, which has a pass or not."""
        self._told = step
        if computes:
            self._open[step] = None

    def ended(self, step: int) -> None:
        """Every rank has ended the pass of `step`: the device itself, not only the thread that submitted it."""
        self._open.pop(step, None)

    def have_ended(self, step: int) -> bool:
        """Every pass up to `step` has ended, on all ranks."""
        return step <= self._told and next(iter(self._open), self._told + 1) > step

    def forget(self) -> None:
        """The workers were started again: nothing told so far runs any more."""
        self._open.clear()
