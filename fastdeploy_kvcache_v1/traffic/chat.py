"""Chat: conversations of people, who read the answer and think before they ask on."""

from __future__ import annotations

from collections.abc import Iterator

from .sessions import Turn, conversation, interleaved
from .source import Line, Shape, Source

SYSTEM_TOKENS = 350
MEAN_TURNS = 4.0


def chat(source: Source, shape: Shape) -> Iterator[Line]:
    """First messages of `tokens`, about, behind one of `items` system prompts, of which the first is asked most."""
    systems = [source.fresh(source.about(SYSTEM_TOKENS)) for _ in range(shape.items)]
    popularity = source.zipf(shape.items, 1.0)

    def session() -> Iterator[Turn]:
        # Most conversations end after a turn or two, and a few go on for long.
        num_turns = min(100, max(1, round(source.random.expovariate(1 / MEAN_TURNS))))
        return conversation(
            source,
            source.longer(systems[popularity.draw()], source.about(shape.tokens, spread=1.0)),
            num_turns=num_turns,
            output_tokens=250,
            more_tokens=120,
            pause_ms=25_000,
        )

    return interleaved(source, shape.rate / MEAN_TURNS, session)
