"""Shifting: a few documents are popular, and every now and then others are. Old counts of uses mislead then."""

from __future__ import annotations

from collections.abc import Iterator

from .source import Line, Shape, Source

SECONDS = 300
"""From one change of what is popular to the next."""


def shifting(source: Source, shape: Shape) -> Iterator[Line]:
    """`items` documents of `tokens`, about, each with a question of its own behind it every time."""
    documents = [source.fresh(source.about(shape.tokens)) for _ in range(shape.items)]
    popularity = source.zipf(shape.items, 1.0)
    period = 0
    for now in source.times_ms(shape.rate):
        if now >= 1000 * SECONDS * (period + 1):
            period = int(now / (1000 * SECONDS))
            source.random.shuffle(documents)
        document = documents[popularity.draw()]
        yield source.line(now, source.longer(document, source.about(60)), source.about(150))
