"""Breaker: leaves a store alone that fails again and again (the circuit breaker of Nygard, "Release It!")."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..messages import LoadDone, StoreDone

__all__ = ["Breaker", "of_rank"]

logger = logging.getLogger(__name__)

FAILURES = 3
"""In a row; then the store is left alone."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Closed: all may pass. Open: nothing may, for a while that doubles with every failed try. Then one may try.

    With several ranks a try is over when all have answered, and has failed if one has. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES

    def may_pass(self) -> bool:
        """Once the pause is over this is True for one caller, whose result decides."""
        if not self.is_open:
            return True
        if self._clock() < self._until:
            return False
        self._until = self._clock() + self._pause_s  # for the others
        return True

    def seconds_left(self) -> float | None:
        """Until one may try; None if all may."""
        return max(0.0, self._until - self._clock()) if self.is_open else None

    def answered(self, error: str | None) -> None:
        """A try has succeeded, or failed with `error`."""
        if error is None:
            self.succeeded()
        else:
            self.failed(error)

    def succeeded(self) -> None:
        if self.is_open:
            logger.warning("the store works again")
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures < FAILURES:
            return
        if self._failures == FAILURES:
            logger.warning("the store is not used for %.0f s: %s", self._pause_s, reason)
        else:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._until = self._clock() + self._pause_s


def of_rank(answer: LoadDone | StoreDone) -> str | None:
    """The error of `answer`, and whose it is."""
    return None if answer.error is None else f"rank {answer.rank}: {answer.error}"
