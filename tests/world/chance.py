"""Random choices of a run: its faults, and a source of random numbers for each event.

Every event draws from a source of its own, so a run without some of its events makes the same choices in the others.
Each run switches off a random half of the faults, because one fault can hide another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

FAULTS = {
    # name: rate
    "copy to host fails": 0.1,  # a copy out of the device fails, and its target is garbage
    "late report": 0.5,  # a rank's report is still on its way
    "lost in schedule": 0.02,  # FastDeploy's schedule raises after it scheduled some
    "lost before put": 0.02,  # FastDeploy raises between schedule and its queue
    "lost in put": 0.02,  # the queue raises before it holds the batch
    "lost after put": 0.02,  # the queue raises after it holds the batch
    "store fails": 0.1,  # a call of the store fails, and garbage is written
    "store loses": 0.05,  # values vanish from the store
    "store lies": 0.05,  # a value has other bytes; its digest tells
    "store is full": 0.1,  # a store is refused for lack of room
    "copy to device fails": 0.4,  # a copy into the device fails, and its target is garbage
    "fetch breaks": 0.1,  # a decode server's read breaks
    "lease breaks": 0.05,  # a prefill server loses its peer
    "answer breaks": 0.05,  # the connection breaks before the first token arrives
    "answer is lost": 0.05,  # a first token never arrives, without an error: a timeout ends the wait
    "message comes twice": 0.1,  # a prefill server sends a message again
    "late batch": 0.95,  # the decode server's worker receives its batch late
    "garbled images": 0.05,  # a client sends images that cannot be hashed
    "store is busy": 0.9,  # a call of the store is slow, and the next ones wait for it
}
"""Name -> probability at each opportunity. Faults of 0.5 and more are delays, which the trace does not show."""


class Faults:
    def __init__(self, on: Iterable[str], log: Callable[..., None] = lambda *words: None) -> None:
        self.on, self._log = frozenset(on), log
        self.count: Counter[str] = Counter()
        self.are_over = False

    def draw(self, name: str, rng: random.Random) -> bool:
        """Draw also for a fault that is off, so that `off` changes no later draw. If it strikes, call `injected`."""
        return rng.random() < FAULTS[name] and name in self.on and not self.are_over

    def injected(self, name: str) -> None:
        self.count[name] += 1
        if FAULTS[name] < 0.5:
            self._log("fault:", name)

    def strike(self, name: str, rng: random.Random) -> bool:
        """`draw`, for a place where a fault that is drawn always strikes."""
        struck = self.draw(name, rng)
        if struck:
            self.injected(name)
        return struck


def source(seed: object, name: object) -> random.Random:
    """Seeded by text, which does not depend on PYTHONHASHSEED."""
    return random.Random(f"{seed}:{name}")


def pick(things: Iterable[Any], at: float) -> Any:
    """The thing at the share `at` (0 <= at < 1) of the list; None for an empty list."""
    found = list(things)
    return found[int(at * len(found))] if found else None


def numbers(text: str) -> list[int]:
    """Parse numbers and ranges, such as `3,7,12-40`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
