"""Agents: long shared instructions with descriptions of tools, and calls that follow each other quickly."""

from __future__ import annotations

from collections.abc import Iterator

from .sessions import Turn, conversation, interleaved
from .source import Line, Shape, Source

MEAN_CALLS = 6.5


def agents(source: Source, shape: Shape) -> Iterator[Line]:
    """`items` kinds of agents with instructions of `tokens`, about; the first kinds run most. A session is a task, and
    one to twelve calls of tools, whose results become part of the prompt.
    """
    instructions = [source.fresh(source.about(shape.tokens)) for _ in range(shape.items)]
    popularity = source.zipf(shape.items, 1.0)

    def session() -> Iterator[Turn]:
        return conversation(
            source,
            source.longer(instructions[popularity.draw()], source.about(500)),
            num_turns=source.random.randint(1, 12),
            output_tokens=100,
            more_tokens=600,
            pause_ms=1_500,
        )

    return interleaved(source, shape.rate / MEAN_CALLS, session)
