"""Scan: every prompt is new. No cache can hit anything; a good one loses nothing else to it."""

from __future__ import annotations

from collections.abc import Iterator

from .source import Line, Shape, Source


def scan(source: Source, shape: Shape) -> Iterator[Line]:
    """Prompts of `tokens`, about; `items` means nothing."""
    for now in source.times_ms(shape.rate):
        yield source.line(now, source.fresh(source.about(shape.tokens)), source.about(200))
