"""Is the worker getting on? It counts what it has done, and tells the engine process.

Counting progress tells more than a beating heart: a thread of its own would go on beating beside one that hangs. And
it is patient where patience is due: however long a step takes on a slow machine, each of its layers is a sign of life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

TELL_EVERY_S = 0.1

LONGEST_TICK_S = 1.0
"""Longer since the last look: this process stood still itself (a stopped container), and the look proves nothing."""


class Progress(NamedTuple):
    """What a worker has done since its start."""

    computed: int = 0
    """Grows with every step taken, layer computed and step answered."""
    copies_ended: int = 0
    """Grows with every copy that ends, well or not."""
    oldest_copy: int = -1
    """Swap step of the oldest copy that still runs, -1 for none."""
    waits_for_ranks: bool = False
    """For what other tensor-parallel ranks compute."""


class ProgressTeller:
    """The worker's side: sends its `Progress`. Counting up waits for the next message; all else is told at once."""

    def __init__(self, send: Callable[[Progress], None]) -> None:
        self._send = send
        self._now = self._told = Progress()
        self._told_at = 0.0

    def advance(self) -> None:
        """Something was computed."""
        self._tell(self._now._replace(computed=self._now.computed + 1))

    def set_copies(self, ended: int, oldest: int) -> None:
        self._tell(self._now._replace(copies_ended=ended, oldest_copy=oldest))

    def set_waits(self, waits_for_ranks: bool) -> None:
        self._tell(self._now._replace(waits_for_ranks=waits_for_ranks))

    def _tell(self, progress: Progress) -> None:
        self._now, now = progress, time.monotonic()
        only_computed = self._told._replace(computed=progress.computed) == progress
        if progress != self._told and not (only_computed and now - self._told_at < TELL_EVERY_S):
            self._told, self._told_at = progress, now
            self._send(progress)


class _Wait:
    """How long something has been expected to change."""

    def __init__(self) -> None:
        self._state: Hashable | None = None
        self._seconds = 0.0

    def seconds(self, state: Hashable | None, elapsed: float) -> float:
        """`state` None: nothing is expected. `elapsed` is the time since the last call."""
        self._seconds = self._seconds + elapsed if state is not None and state == self._state else 0.0
        self._state = state
        return self._seconds


class Watchdog:
    """Decides from one look after another whether the worker is stuck. Pure, one thread."""

    def __init__(self, limit_s: float) -> None:
        """Seconds without any progress that are too many; 0 never finds anything."""
        self._limit_s = limit_s
        self._last: float | None = None
        self._compute, self._copies = _Wait(), _Wait()

    def look(self, now: float, progress: Progress, *, step: int | None) -> str | None:
        """What is stuck and for how long, or None. `step` is the one that the worker owes an answer to."""
        elapsed = 0.0 if self._last is None else min(now - self._last, LONGEST_TICK_S)
        self._last = now
        computes = step is not None and not progress.waits_for_ranks
        compute_s = self._compute.seconds((step, progress.computed) if computes else None, elapsed)
        copies_s = self._copies.seconds(None if progress.oldest_copy < 0 else progress.copies_ended, elapsed)
        if not self._limit_s:
            return None
        if compute_s >= self._limit_s:
            return f"step {step} has computed nothing for {compute_s:.0f} s"
        if copies_s >= self._limit_s:
            return f"the copy of swap step {progress.oldest_copy} has not ended for {copies_s:.0f} s"
        return None
