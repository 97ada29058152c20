"""What all kinds of traffic are made of: prompts that grow, lines of a trace, seeded choices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

TOKENS_PER_ID = 64

MS_PER_TOKEN = 30
"""Between two output tokens, where a later turn waits for them: as `replay --closed-loop` has it."""

Line = dict[str, Any]
"""One line of a trace, see `replay/trace.py`. In milliseconds and tokens."""


@dataclass(frozen=True)
class Shape:
    """What a user may choose; what it means beside the rate is for each kind to say."""

    rate: float
    """Requests per second, on average."""
    tokens: int
    items: int


@dataclass(frozen=True)
class Prompt:
    """A text of which only length and identity matter. Two prompts with equal ids begin with the same tokens."""

    length: int = 0
    ids: tuple[int, ...] = ()
    """Of its full blocks."""


class Source:
    """Seeded dice, and ids that nobody else gets: the same seed makes the same traffic. Not thread-safe."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._new_id = count(1).__next__

    def longer(self, prompt: Prompt, num_tokens: int) -> Prompt:
        """`prompt` with so many new tokens behind it."""
        length = prompt.length + num_tokens
        num_new = length // TOKENS_PER_ID - len(prompt.ids)
        return Prompt(length, prompt.ids + tuple(self._new_id() for _ in range(num_new)))

    def fresh(self, num_tokens: int) -> Prompt:
        """Tokens that were never sent before."""
        return self.longer(Prompt(), num_tokens)

    def about(self, median: float, *, spread: float = 0.6) -> int:
        """Log-normal, at least 1: lengths of texts and pauses of people are (spread 0.6: one in six is 1.8 times as
        much).
        """
        return max(1, round(median * self.random.lognormvariate(0, spread)))

    def times_ms(self, per_second: float) -> Iterator[float]:
        """Poisson arrivals."""
        now = 0.0
        while True:
            now += 1000 * self.random.expovariate(per_second)
            yield now

    def zipf(self, num_items: int, exponent: float) -> Zipf:
        return Zipf(self.random, num_items, exponent)

    def line(self, time_ms: float, prompt: Prompt, output_length: int, *, whole: Prompt | None = None) -> Line:
        """`whole`: prompt and output together, where a later prompt repeats the output."""
        partial = () if prompt.length % TOKENS_PER_ID == 0 else (self._new_id(),)
        line: Line = {
            "timestamp": round(time_ms),
            "input_length": prompt.length,
            "output_length": output_length,
            "tokens_per_id": TOKENS_PER_ID,
            "hash_ids": [*prompt.ids, *partial],
        }
        if whole is not None:
            line["output_hash_ids"] = list(whole.ids[len(prompt.ids) :])
        return line


class Zipf:
    """Item `i` of `num_items` is drawn in proportion to `1 / (i + 1) ** exponent`."""

    def __init__(self, rng: random.Random, num_items: int, exponent: float) -> None:
        self._random = rng
        self._items: Sequence[int] = range(num_items)
        self._weights = list(accumulate((item + 1) ** -exponent for item in self._items))

    def draw(self) -> int:
        return self._random.choices(self._items, cum_weights=self._weights)[0]
