"""ToldCopies: which runs took part in copies of which the worker has been told lately."""

from __future__ import annotations

from collections.abc import Sequence

from .run import Run

REMEMBERED_STEPS = 256
"""A copy that fails later than this many steps with copies after it was told is searched for in the whole cache."""


class ToldCopies:
    """By step number. Not thread-safe: the manager's lock covers it.

    Runs are cut, joined and evicted after they have been told of. Whatever happened to one, its blocks that are still
    cached are in the run itself or above it: a cut leaves a run the lower part, and one that was joined leads to the
    run that took its blocks.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Sequence[Run]] = {}
        self._last_dropped = -1

    def remember(self, step: int, runs: Sequence[Run]) -> None:
        """`runs`, at least one, had an open copy when `step` was taken."""
        self._steps[step] = runs
        if len(self._steps) > REMEMBERED_STEPS:
            self._last_dropped = next(iter(self._steps))
            del self._steps[self._last_dropped]

    def of(self, step: int) -> list[Run] | None:
        """Runs that may hold blocks copied in `step`; None when that was too long ago. O(their prefixes)."""
        if step not in self._steps:
            return None if step <= self._last_dropped else []
        found: dict[Run, None] = {}
        for told in self._steps[step]:
            run = told
            while run.parent is not None and run not in found:
                found[run] = None
                run = run.parent
        return list(found)

    def forget(self) -> None:
        """Nothing that was copied until now can be found any more."""
        self._steps.clear()
        self._last_dropped = -1
