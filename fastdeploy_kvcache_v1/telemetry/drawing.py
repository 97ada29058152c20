"""Figures for pages about the cache: bars on a linear axis and maps of blocks, as SVG that needs no script.

Colours are CSS classes of `STYLE`. Every text is escaped. Sizes are in pixels at the figure's natural size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

FONT = 13
LETTER = 8.2
"""Width of a letter, on average over a label, in the widest of the usual fonts."""
ROW = 24
BAR = 14

LIGHT = {
    "paper": "#ffffff", "ink": "#1f2933", "quiet": "#52606d", "line": "#d5dbe1", "free": "#e4e9ee",
    "computed": "#8c98a4", "device": "#12908e", "host": "#5468d4", "disk": "#b0429f", "waiting": "#d9a514",
    "rest": "#c3cbd3", "document": "#2b7bd0", "chat": "#e5811d", "other": "#7d8790",
}  # fmt: skip
DARK = LIGHT | {
    "paper": "#12171d", "ink": "#e8edf2", "quiet": "#a9b4bf", "line": "#36414c", "free": "#222b34",
    "computed": "#6f7d8a", "device": "#2bb3ae", "host": "#7f90f0", "disk": "#d06cc0", "rest": "#4a5763",
    "document": "#4f9cf0", "chat": "#f29a42",
}  # fmt: skip
FILLS = tuple(name for name in LIGHT if name not in ("paper", "ink", "quiet", "line"))
"""Kinds of marks."""


def _colours(values: dict[str, str]) -> str:
    return ":root{" + "".join(f"--{name}:{value};" for name, value in values.items()) + "}"


STYLE = "\n".join(
    (
        _colours(LIGHT),
        "@media (prefers-color-scheme: dark){" + _colours(DARK) + "}",
        f"svg text{{font:{FONT}px system-ui,sans-serif;fill:var(--ink)}}",
        "svg text.quiet{fill:var(--quiet)}",
        "svg text.strong{font-weight:600}",
        "svg text.title{font-weight:600;font-size:16px}",
        "svg .line{stroke:var(--line);fill:none}",
        "svg .paper{fill:var(--paper)}",
        *(f"svg .{name}{{fill:var(--{name})}}" for name in FILLS),
    )
)
"""For the page, or the SVG file, that holds the figures. Light or dark as the reader's system is."""


class Cell(NamedTuple):
    kind: str
    marked: bool = False


@dataclass
class Figure:
    """Elements from the top left corner on."""

    width: float
    height: float = 0.0
    elements: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """`title` is shown where the pointer rests."""
        inner = f"<title>{escape(title)}</title>" if title else ""
        size = f'width="{width:.4g}" height="{height:.4g}"'
        self.elements.append(f'<rect class="{kind}" x="{x:.4g}" y="{y:.4g}" {size}>{inner}</rect>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.elements.append(
            f'<text class="{kind}" x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, x: float, top: float, bottom: float) -> None:
        self.elements.append(f'<path class="line" d="M{x:.4g} {top:.4g}V{bottom:.4g}"/>')

    def cell(self, x: float, y: float, size: float, cell: Cell) -> None:
        self.rect(x, y, size, size, cell.kind)
        if cell.marked:
            self.rect(x + size / 3, y + size / 3, size / 3, size / 3, "paper")

    def place(self, other: Figure, x: float, y: float) -> None:
        self.elements += [f'<g transform="translate({x:.4g} {y:.4g})">', *other.elements, "</g>"]

    def svg(self, label: str, style: str = "") -> str:
        """`label` says what is drawn to those who do not see it; `style` makes it a file of its own."""
        size = f'viewBox="0 0 {self.width:g} {math.ceil(self.height)}"'
        if style:
            size += f' width="{self.width:g}" height="{math.ceil(self.height)}"'
            style = f'<style>{style}</style><rect class="paper" width="100%" height="100%"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">'
        return "\n".join((head + style, *self.elements, "</svg>"))


class Part(NamedTuple):
    value: float
    kind: str
    title: str


class Bar(NamedTuple):
    label: str
    parts: Sequence[Part]
    text: str
    """Behind its end."""


def bars(rows: Sequence[Bar], *, width: float, most: float, unit: Callable[[float], str]) -> Figure:
    """Horizontal bars of stacked parts over one linear axis from 0 to `most`. `unit` writes the axis."""
    left = LETTER * max(len(row.label) for row in rows) + 8
    right = max(LETTER * max(len(row.text) for row in rows) + 8, LETTER * len(unit(most)) / 2)
    scale = (width - left - right) / (most or 1.0)
    bottom = ROW * len(rows)
    figure = Figure(width, bottom + ROW)
    for tick in ticks(most, 2 + int(most * scale / 90)):
        figure.line(left + tick * scale, 0, bottom)
        figure.text(left + tick * scale, bottom + FONT + 3, unit(tick), "quiet", "middle")
    for number, row in enumerate(rows):
        top, x = number * ROW + (ROW - BAR) / 2, left
        figure.text(left - 8, top + BAR - 2, row.label, anchor="end")
        for value, kind, title in row.parts:
            if value > 0:
                figure.rect(x, top, max(value * scale, 0.5), BAR, kind, title)
                x += value * scale
        figure.text(x + 6, top + BAR - 2, row.text, "strong")
    return figure


def ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 to `most`, about `count` of them."""
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= most)
    return [number * step for number in range(int(most / step + 1e-9) + 1)]


class Band(NamedTuple):
    """One tier."""

    name: str
    columns: Sequence[Sequence[Cell]]


def cell_map(heads: Sequence[tuple[str, str]], bands: Iterable[Band], *, width: float, per_row: int) -> Figure:
    """A column of cells for each of `heads`, two lines each, in each band. A marked cell is a ring."""
    column = width / len(heads)
    pitch = (column - 8) / per_row
    figure, y = Figure(width), 2.0 * FONT + 8
    for number, head in enumerate(heads):
        for line, (words, kind) in enumerate(zip(head, ("", "quiet"), strict=True), 1):
            figure.text(number * column, line * (FONT + 2) - 2, words, kind)
    for band in bands:
        figure.text(0, y + FONT, band.name, "strong")
        y += FONT + 7
        for number, cells in enumerate(band.columns):
            for place, cell in enumerate(cells):
                left, top = number * column + place % per_row * pitch, y + place // per_row * pitch
                figure.cell(left, top, pitch - 1, cell)
        y += math.ceil(max(map(len, band.columns)) / per_row) * pitch + 8
    figure.height = y
    return figure


def swatch(cell: Cell) -> Figure:
    """A sample of a colour, for a legend."""
    figure = Figure(12, 12)
    figure.cell(0, 0, 12, cell)
    return figure


def legend(entries: Iterable[tuple[Cell, str]]) -> str:
    """HTML: each colour with its words, in as many lines as the reader's window needs."""
    keys = (f'<span class="key">{swatch(cell).svg(words)}{escape(words)}</span>' for cell, words in entries)
    return f'<p class="legend">{"".join(keys)}</p>'


def seconds(value: float) -> str:
    """With two digits that count, from a millisecond on."""
    digits = 1 - math.floor(math.log10(value)) if value >= 0.001 else 3
    return f"{value:.{min(3, max(0, digits))}f} s"
