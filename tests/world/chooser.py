"""Tickets: every event of a run draws from a source of its own, so that leaving some out does not change the others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class Chooser:
    def __init__(self, seed: int, tickets: Sequence[int]) -> None:
        self.seed, self.tickets = seed, tickets

    def source(self, name: object) -> random.Random:
        """Seeded by text, which does not depend on PYTHONHASHSEED."""
        return random.Random(f"{self.seed}:{name}")

    def __iter__(self) -> Iterator[tuple[int, random.Random]]:
        for ticket in self.tickets:
            yield ticket, self.source(ticket)


def pick(things: Iterable[Any], at: float) -> Any:
    """The one of them that `at`, from 0 to 1, says; None where there are none."""
    found = list(things)
    return found[int(at * len(found))] if found else None


def ranges(numbers: Sequence[int]) -> str:
    """`3,7,12-40`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def numbers(text: str) -> list[int]:
    """Inverse of `ranges`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
