"""Every kind of traffic by its name: a new one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .agents import agents
from .batch import batch
from .chat import chat
from .hot import hot
from .loop import loop
from .scan import scan
from .shifting import shifting
from .source import Line, Shape, Source


class Kind(NamedTuple):
    """`lines` never end; what `tokens` and `items` mean stands there. The shape is that of real traffic."""

    lines: Callable[[Source, Shape], Iterator[Line]]
    shape: Shape


KINDS = {
    "scan": Kind(scan, Shape(rate=4, tokens=4_000, items=1)),
    "loop": Kind(loop, Shape(rate=4, tokens=6_000, items=300)),
    "hot": Kind(hot, Shape(rate=10, tokens=6_000, items=1)),
    "chat": Kind(chat, Shape(rate=6, tokens=900, items=3)),
    "agents": Kind(agents, Shape(rate=6, tokens=6_000, items=40)),
    "shifting": Kind(shifting, Shape(rate=4, tokens=4_000, items=600)),
    "batch": Kind(batch, Shape(rate=6, tokens=5_000, items=4)),
}
