"""What is drawn. Every event of a run draws from a source of its own, so that leaving some out does not change the
others. A random half of the faults is off in each run, so that each meets what others hide.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

FAULTS = {
    # name: rate
    "copy to host fails": 0.1,  # a copy out of the device fails, and its target is garbage
    "late report": 0.5,  # a rank's word is on its way
    "lost in schedule": 0.02,  # FastDeploy's schedule raises after it scheduled some
    "lost before put": 0.02,  # what FastDeploy does between schedule and its queue raises
    "lost in put": 0.02,  # the queue raises before it has the batch
    "lost after put": 0.02,  # the queue raises though it has the batch
    "store fails": 0.1,  # a call of the store fails, and garbage is written
    "store loses": 0.05,  # values vanish from the store
    "store lies": 0.05,  # a value has other bytes; its digest tells
    "store is full": 0.1,  # nothing more is stored
    "copy to device fails": 0.4,  # a copy into the device fails, and its target is garbage
    "fetch breaks": 0.1,  # a decode server's read breaks
    "lease breaks": 0.05,  # a prefill server loses its peer
    "answer breaks": 0.05,  # the connection on which a first token is awaited breaks
    "answer is lost": 0.05,  # a first token never comes, and nothing says so: a time-out ends it
    "message comes twice": 0.1,  # what a prefill server sends is sent again
    "late batch": 0.95,  # the decode server's worker has its batch late
    "garbled images": 0.05,  # a client sends images that cannot be hashed
    "store is busy": 0.9,  # a call of the store goes on, and others wait for it to end
}


class Faults:
    def __init__(self, on: Iterable[str]) -> None:
        self.on = frozenset(on)
        self.count: Counter[str] = Counter()
        self.are_over = False

    def strike(self, name: str, rng: random.Random) -> bool:
        """Draws in any case, so that a fault that is off shifts nothing."""
        struck = rng.random() < FAULTS[name] and name in self.on and not self.are_over
        self.count[name] += struck
        return struck


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
