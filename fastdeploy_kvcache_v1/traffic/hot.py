"""Hot: one long system prompt, which all requests share, and a short question that nobody repeats."""

from __future__ import annotations

from collections.abc import Iterator

from .source import Line, Shape, Source


def hot(source: Source, shape: Shape) -> Iterator[Line]:
    """A system prompt of exactly `tokens`; `items` means nothing."""
    system = source.fresh(shape.tokens)
    for now in source.times_ms(shape.rate):
        yield source.line(now, source.longer(system, source.about(400)), source.about(150))
