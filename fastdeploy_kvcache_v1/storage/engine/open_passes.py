"""OpenPasses: which forward passes still run, so that storage touches no device slot that one of them uses."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["OpenPasses", "Passes"]


class Passes(ABC):
    """What is known of the workers' passes. O(ranks) each; not thread-safe."""

    @abstractmethod
    def told(self, step: int, *, computes: bool) -> None:
        """The workers are being told of `step`, which has a pass or not."""

    def ended(self, step: int) -> None:  # noqa: B027
        """Every rank has ended the pass of `step`: the device itself, not only the thread that submitted it."""

    @property
    def are_doubted(self) -> bool:
        """No slot is known to be quiet before the workers have been sent one more batch."""
        return False

    @abstractmethod
    def have_ended(self, step: int, since: float) -> bool:
        """Every pass up to `step` has ended, on all ranks, and so has every one that knew less than what was so at the
        time `since`: slots that were free then are used by none.
        """


class OpenPasses(Passes):
    """Of an engine that gives each pass a step of its own, and hears of its end."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}
        self._told = -1

    def told(self, step: int, *, computes: bool) -> None:
        self._told = step
        if computes:
            self._open[step] = None

    def ended(self, step: int) -> None:
        self._open.pop(step, None)

    def have_ended(self, step: int, since: float) -> bool:
        return step <= self._told and next(iter(self._open), self._told + 1) > step
