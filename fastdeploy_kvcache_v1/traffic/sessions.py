"""Sessions that run beside each other: turns of each in order, all together by time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .source import MS_PER_TOKEN, Line, Prompt, Source


class Turn(NamedTuple):
    """One request of a session."""

    prompt: Prompt
    output_length: int
    whole: Prompt
    """Prompt and output."""
    pause_ms: int | None = None
    """Between the end of the turn before and this one; None for a first turn."""


def interleaved(source: Source, sessions_per_second: float, session: Callable[[], Iterator[Turn]]) -> Iterator[Line]:
    """Lines in the order of arrival, without end. Sessions begin at random; turns follow each other with pauses."""
    starts = source.times_ms(sessions_per_second)
    next_start, num_sessions = next(starts), 0
    waiting: list[tuple[float, int, Turn, Iterator[Turn]]] = []
    while True:
        while not waiting or next_start <= waiting[0][0]:
            turns = session()
            heapq.heappush(waiting, (next_start, num_sessions, next(turns), turns))
            num_sessions += 1
            next_start = next(starts)
        now, number, turn, turns = heapq.heappop(waiting)
        yield _line(source, now, number, turn)
        following = next(turns, None)
        if following is not None:
            begin = now + turn.output_length * MS_PER_TOKEN + (following.pause_ms or 0)
            heapq.heappush(waiting, (begin, number, following, turns))


def _line(source: Source, now: float, number: int, turn: Turn) -> Line:
    line = source.line(now, turn.prompt, turn.output_length, whole=turn.whole)
    delay = {} if turn.pause_ms is None else {"delay": turn.pause_ms}
    return {**line, "session_id": number, **delay}


def conversation(
    source: Source,
    prompt: Prompt,
    *,
    num_turns: int,
    output_tokens: float,
    more_tokens: float,
    pause_ms: float,
) -> Iterator[Turn]:
    """A session that begins with `prompt`; each later prompt holds all before it, the last output too, and more.

    Numbers are medians.
    """
    for number in range(num_turns):
        output_length = source.about(output_tokens)
        whole = source.longer(prompt, output_length)
        yield Turn(prompt, output_length, whole, source.about(pause_ms, spread=1.0) if number else None)
        prompt = source.longer(whole, source.about(more_tokens))
