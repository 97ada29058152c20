"""Tickets: every event of a run draws from a source of its own, so that leaving some out does not change the others."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any


def source(seed: object, name: object) -> random.Random:
    """Seeded by text, which does not depend on PYTHONHASHSEED."""
    return random.Random(f"{seed}:{name}")


def pick(things: Iterable[Any], at: float) -> Any:
    """The one of them that `at`, from 0 to 1, says; None where there are none."""
    found = list(things)
    return found[int(at * len(found))] if found else None


def numbers(text: str) -> list[int]:
    """Of `3,7,12-40`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
