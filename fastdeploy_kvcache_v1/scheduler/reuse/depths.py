"""Which blocks of a prompt are watched: four in each octave of depth, O(log n) of n."""

from __future__ import annotations

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

WIDTHS = tuple(depth - above for depth, above in zip(DEPTHS, (0, *DEPTHS), strict=False))
"""Blocks that each watched one stands for."""
