"""A picture of a comparison: hit rate over the blocks of both tiers, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...telemetry.drawing import ticks

MOST_PAIRS = 4
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")
GREY = "#6b7280"

WIDTH, HEIGHT, LEGEND = 720, 400, 20
"""Of the plot with its labels, and the height of a line of the legend."""
LEFT, END, TOP, FLOOR = 60, 690, 40, 340
"""Of the plot alone."""
STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#1f2933}polyline,path{fill:none;stroke-width:2}"
    'path.grid{stroke:#d5dbe1;stroke-width:1}</style><rect width="100%" height="100%" fill="#fff"/>'
)


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[int, float]]
    """Blocks of both tiers and hit rate, from small to large."""
    colour: str
    dashes: str = ""


def check(num_pairs: int, num_sizes: int) -> None:
    """Raises `ConfigError` for a comparison that one picture cannot show."""
    if num_pairs > MOST_PAIRS:
        raise ConfigError(
            f"--picture shows up to {MOST_PAIRS} pairs of policies, got {num_pairs}: choose with --policies, "
            "auto,adaptive,lru for example"
        )
    if num_sizes < 2:
        raise ConfigError("--picture needs several sizes: give --host-blocks several numbers, 0,1000,2000 for example")


def drawn(result: dict[str, Any]) -> str:
    """The SVG of a `Comparison.run`: a line per pair of policies, the clairvoyant bound, one LRU tier."""
    lines = list(_lines(result))
    most = max(blocks for line in lines for blocks, _ in line.points)
    best = max(0.01, *(rate for line in lines for _, rate in line.points))
    step = ticks(best, 8)[1]
    top = math.ceil(best / step) * step

    def place(blocks: float, rate: float) -> tuple[float, float]:
        return LEFT + (END - LEFT) * blocks / most, FLOOR - (FLOOR - TOP) * rate / top

    body = [f'<text x="{LEFT}" y="16">hit rate: share of the prompt tokens found in the cache</text>']
    for rate in ticks(top, 8):
        _, y = place(0, rate)
        body.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{END}"/>')
        body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{100 * rate:.3g}%</text>')
    for blocks in ticks(most, 8):
        x, _ = place(blocks, 0)
        body.append(f'<text x="{x:.1f}" y="{FLOOR + 20}" text-anchor="middle">{blocks:,.0f}</text>')
    body.append(f'<text x="{(LEFT + END) / 2}" y="{FLOOR + 42}" text-anchor="middle">blocks of both tiers</text>')
    for number, line in enumerate(lines):
        body += _drawn(line, [place(*point) for point in line.points], HEIGHT + number * LEGEND)
    height = HEIGHT + len(lines) * LEGEND
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    label = 'role="img" aria-label="Hit rate over the blocks of both tiers"'
    return "\n".join((f"{head} {label}>", STYLE, *body, "</svg>\n"))


def _drawn(line: Line, spots: Sequence[tuple[float, float]], y: float) -> Iterator[str]:
    """A line through `spots`, with its entry of the legend at `y`."""
    style = f'stroke="{line.colour}" stroke-dasharray="{line.dashes}"'
    yield f'<polyline {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in spots)}"/>'
    for spot, (blocks, rate) in zip(spots, line.points, strict=True):
        title = f"<title>{escape(line.name)}: {rate:.1%} with {blocks:,} blocks</title>"
        yield f'<circle cx="{spot[0]:.1f}" cy="{spot[1]:.1f}" r="3.5" fill="{line.colour}">{title}</circle>'
    yield f'<path {style} d="M{LEFT} {y - 4}h32"/><text x="{LEFT + 42}" y="{y}">{escape(line.name)}</text>'


def _lines(result: dict[str, Any]) -> Iterator[Line]:
    sizes = sorted(result["capacities"], key=lambda at: int(at["device_blocks"] + at["host_blocks"]))
    totals = [at["device_blocks"] + at["host_blocks"] for at in sizes]

    def line(name: str, rates: Sequence[float], colour: str, dashes: str = "") -> Line:
        return Line(name, list(zip(totals, rates, strict=True)), colour, dashes)

    if sizes[0]["clairvoyant"] is not None:
        yield line("clairvoyant bound", [at["clairvoyant"] for at in sizes], GREY, "2 4")
    yield line("one LRU tier of both sizes", [at["one_lru_tier"] for at in sizes], GREY, "8 4")
    pairs = dict.fromkeys(map(_pair, sizes[-1]["runs"]))
    for pair, colour in zip(pairs, COLOURS, strict=False):
        rates = [next(run for run in at["runs"] if _fits(run, pair))["hit_rate"]["total"] for at in sizes]
        yield line(" ".join(pair), rates, colour)


def _fits(run: dict[str, Any], pair: tuple[str, str]) -> bool:
    """Without a host tier only the eviction policy counts."""
    own = _pair(run)
    return own == pair if run["options"]["host_blocks"] else own[1] == pair[1]


def _pair(run: dict[str, Any]) -> tuple[str, str]:
    return run["options"]["write_policy"], run["options"]["eviction_policy"]
