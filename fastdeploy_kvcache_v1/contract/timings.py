"""What prefills took, as the worker measures it and `PrefillCosts` learns from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


def positions(start: int, end: int) -> float:
    """What attention costs more behind a longer context: tokens `[start, end)` times the tokens before them."""
    return (end * end - start * start) / 2


class PrefillTime(NamedTuple):
    """A forward pass that computed prompts."""

    num_tokens: int
    """Of prompts. What decodes in the same pass is not counted, though it takes some of the time."""
    num_positions: float
    """See `positions`, summed over the prompts."""
    seconds: float
    """In which it did not stand still for copies."""

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], seconds: float) -> PrefillTime:
        """A pass that computed tokens `[start, end)` of each prompt."""
        chunks = list(chunks)
        return cls(sum(end - start for start, end in chunks), sum(positions(*chunk) for chunk in chunks), seconds)
