"""Loop: documents are asked about in turn, again and again. LRU throws each out just before it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from .source import Line, Shape, Source


def loop(source: Source, shape: Shape) -> Iterator[Line]:
    """`items` documents of `tokens`, about; each with another question behind it every time."""
    documents = cycle([source.fresh(source.about(shape.tokens)) for _ in range(shape.items)])
    for now, document in zip(source.times_ms(shape.rate), documents, strict=False):
        yield source.line(now, source.longer(document, source.about(60)), source.about(150))
