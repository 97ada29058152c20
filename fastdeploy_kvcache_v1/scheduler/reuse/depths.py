"""Which blocks of a prompt are watched: four in each octave of depth, O(log n) of n."""

from __future__ import annotations

from bisect import bisect_right

PER_OCTAVE = 4
DEEPEST = 1 << 26


def _depths() -> tuple[int, ...]:
    depths, step = list(range(1, PER_OCTAVE)), 1
    while depths[-1] < DEEPEST:
        depths += [step * mantissa for mantissa in range(PER_OCTAVE, 2 * PER_OCTAVE)]
        step *= 2
    return tuple(depths)


DEPTHS = _depths()
"""In blocks from the start of the prompt, ascending. The same for every prompt, so prompts with a common prefix have
common watched blocks; each stands for the blocks between the one before and itself."""

INDICES = tuple(depth - 1 for depth in DEPTHS)
"""The same, counted from 0."""


def last_watched(depth: int) -> int:
    """The deepest watched block up to `depth`; 0 if there is none."""
    end = bisect_right(DEPTHS, depth)
    return DEPTHS[end - 1] if end else 0
