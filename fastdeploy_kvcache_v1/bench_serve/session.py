"""What a measurement sends: sessions of turns, each of which goes on from what was said before."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 97, 122
"""Ids every tokenizer has; lower-case letters for the byte tokenizer."""


@dataclass(frozen=True)
class Turn:
    """One request. Its prompt is all that the session has said and got before, and `tokens`."""

    tokens: tuple[int, ...]
    max_tokens: int
    """Output tokens, exactly."""


@dataclass(frozen=True)
class Session:
    """Turns one after the other. Sessions are independent of each other."""

    name: str
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    """When it begins, counted from the first one's begin, where sessions are not sent as fast as possible."""


def num_requests(sessions: Iterable[Session]) -> int:
    return sum(len(session.turns) for session in sessions)


def longest_prompt(sessions: Iterable[Session]) -> int:
    """Tokens of the longest prompt that will be sent."""
    return max(
        sum(len(turn.tokens) for turn in session.turns) + sum(turn.max_tokens for turn in session.turns[:-1])
        for session in sessions
    )


def poisson(sessions: Sequence[Session], rate: float, seed: int) -> list[Session]:
    """The same sessions, `rate` of them beginning per second on average, with the gaps of a Poisson process."""
    rng, now, timed = random.Random(f"arrival {seed}"), 0.0, []
    for session in sessions:
        timed.append(dataclasses.replace(session, start_s=now))
        now += rng.expovariate(rate)
    return timed


def random_tokens(seed: object, count: int) -> tuple[int, ...]:
    """The same `count` tokens for the same seed, always."""
    return tuple(random.Random(str(seed)).choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=count))
