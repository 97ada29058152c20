"""Breaker: leaves a store alone that fails again and again (the circuit breaker of Nygard, "Release It!")."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Breaker"]

logger = logging.getLogger(__name__)

FAILURES = 3
"""In a row; then the store is left alone."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Closed: all may pass. Open: nothing may, for a while that doubles with every failed try. Then one may try.

    Only what has a result may be a try. Not thread-safe.
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
        if not self.would_pass:
            return False
        if self.is_open:
            self._until = self._clock() + self._pause_s  # for the others
        return True

    @property
    def would_pass(self) -> bool:
        """As `may_pass`, for what is no try."""
        return not self.is_open or self._clock() >= self._until

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
