"""A picture of a comparison: hit rate over the blocks of both tiers, as SVG, or as a page with its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...telemetry.drawing import STYLE, Figure, ticks
from .compare import comparison_table

COLOURS = ("document", "chat", "device", "host")
"""Of the lines of played policies, which a picture has up to so many of."""

TITLE = "Hit rate over the blocks of both tiers"
WIDTH, HEIGHT, LEGEND = 720, 400, 20
"""Of the plot with its labels, and the height of a line of the legend."""
LEFT, END, TOP, FLOOR = 60, 690, 40, 340
"""Of the plot alone."""


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[int, float]]
    """Blocks of both tiers and hit rate, from small to large."""
    colour: str
    dashes: str = ""


def check(num_lines: int, num_sizes: int) -> None:
    """Raises `ConfigError` for a comparison that one picture cannot show."""
    if num_lines > len(COLOURS):
        raise ConfigError(
            f"a picture shows up to {len(COLOURS)} lines of policies, got {num_lines}: choose with --policies, "
            "auto,adaptive,lru for example"
        )
    if num_sizes < 2:
        raise ConfigError("a picture needs several sizes: give --host-blocks several numbers, 0,1000,2000 for example")


def page(result: dict[str, Any]) -> str:
    """A page that needs no other file: the picture and the tables of a `Comparison.run`."""
    style = "body{margin:24px;background:var(--paper);color:var(--ink)}div,pre{overflow-x:auto}"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{TITLE}</title><style>{style}</style>"
    body = f"<div>{drawn(result)}</div><pre>{escape(comparison_table(result))}</pre>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def drawn(result: dict[str, Any]) -> str:
    """The SVG of a `Comparison.run`: a line per pair of policies and told name, the clairvoyant bound, one LRU tier."""
    lines = list(_lines(result))
    most = max(blocks for line in lines for blocks, _ in line.points)
    best = max(0.01, *(rate for line in lines for _, rate in line.points))

    def place(blocks: float, rate: float) -> tuple[float, float]:
        return LEFT + (END - LEFT) * blocks / most, FLOOR - (FLOOR - TOP) * rate / best

    figure = Figure(WIDTH, HEIGHT + len(lines) * LEGEND)
    figure.text(LEFT, 16, "hit rate: share of the prompt tokens found in the cache", "strong")
    figure.text((LEFT + END) / 2, FLOOR + 42, "blocks of both tiers", anchor="middle")
    for rate in ticks(best, 8):
        _, y = place(0, rate)
        figure.elements.append(f'<path class="line" d="M{LEFT} {y:.4g}H{END}"/>')
        figure.text(LEFT - 8, y + 4, f"{100 * rate:.3g}%", "quiet", "end")
    for blocks in ticks(most, 8):
        figure.text(place(blocks, 0)[0], FLOOR + 20, f"{blocks:,.0f}", "quiet", "middle")
    for number, line in enumerate(lines):
        y = HEIGHT + number * LEGEND
        figure.elements += _drawn(line, [place(*point) for point in line.points], y)
        figure.text(LEFT + 42, y, line.name)
    return figure.svg(TITLE, STYLE) + "\n"


def _drawn(line: Line, spots: Sequence[tuple[float, float]], y: float) -> Iterator[str]:
    """A line through `spots`, and its sample in the legend at `y`."""
    style = f'style="fill:none;stroke:var(--{line.colour});stroke-width:2;stroke-dasharray:{line.dashes or "none"}"'
    yield f'<polyline {style} points="{" ".join(f"{x:.4g},{y:.4g}" for x, y in spots)}"/>'
    for (x, spot_y), (blocks, rate) in zip(spots, line.points, strict=True):
        title = f"<title>{escape(line.name)}: {rate:.1%} with {blocks:,} blocks</title>"
        yield f'<circle cx="{x:.4g}" cy="{spot_y:.4g}" r="3.5" style="fill:var(--{line.colour})">{title}</circle>'
    yield f'<path {style} d="M{LEFT} {y - 4}h32"/>'


def _lines(result: dict[str, Any]) -> Iterator[Line]:
    sizes = sorted(result["capacities"], key=lambda at: int(at["device_blocks"] + at["host_blocks"]))
    totals = [at["device_blocks"] + at["host_blocks"] for at in sizes]

    def line(name: str, rates: Sequence[float], colour: str, dashes: str = "") -> Line:
        return Line(name, list(zip(totals, rates, strict=True)), colour, dashes)

    if sizes[0]["clairvoyant"] is not None:
        yield line("clairvoyant bound", [at["clairvoyant"] for at in sizes], "quiet", "2 4")
    yield line("one LRU tier of both sizes", [at["one_lru_tier"] for at in sizes], "quiet", "8 4")
    for played, colour in zip(dict.fromkeys(map(_played, sizes[-1]["runs"])), COLOURS, strict=False):
        write, eviction, told = played
        rates = [next(run for run in at["runs"] if _fits(run, played))["hit_rate"]["total"] for at in sizes]
        yield line(f"{write} {eviction}" + ("" if told == "trace" else f", told: {told}"), rates, colour)


def _fits(run: dict[str, Any], played: Sequence[str]) -> bool:
    """Without a host tier write policies do not count."""
    return _played(run) == played or (not run["options"]["host_blocks"] and _played(run)[1:] == played[1:])


def _played(run: dict[str, Any]) -> tuple[str, str, str]:
    options = run["options"]
    return options["write_policy"], options["eviction_policy"], options["told"]
