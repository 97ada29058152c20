"""The rooms of the package and which imports from which, measured in the sources, and a picture of both."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from graphlib import TopologicalSorter
from html import escape
from itertools import starmap
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "fastdeploy_kvcache_v1"
PICTURE = PACKAGE.parent / "docs" / "house.svg"

LAB = "lab"
WIDTH, ROOM_HEIGHT, FLOOR_HEIGHT, MARGIN, GAP = 1000, 76, 118, 20, 24

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333 }
.name { font-weight: 600; font-size: 15px }
rect { fill: #eef4fb; stroke: #4a7ab0; rx: 6px }
.lab { fill: #f6f2e8; stroke: #b09a4a }
path { fill: none; stroke: #778; stroke-width: 1.3; marker-end: url(#tip) }
.passes { stroke-dasharray: 5 4 }
"""


class Box(NamedTuple):
    left: float
    top: int
    width: float

    @property
    def middle(self) -> float:
        return self.left + self.width / 2


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def place_of(path: Path) -> str:
    """`scheduler` for `scheduler/run.py`, `worker/ops` for `worker/ops/rows.py`, `errors` for `errors.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1]) or parts[0]


@cache
def imported_files(path: Path) -> frozenset[Path]:
    """Files of the package that a file imports, wherever in it, also for types alone."""
    package = [PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        else:
            continue
        found |= {_file_of(name[1:]) for name in names if name[0] == PACKAGE.name}
    return frozenset(found - {path})


def _file_of(name: list[str]) -> Path:
    """The file of the longest part of a dotted name that is a module."""
    path = PACKAGE
    for part in name:
        if (path / f"{part}.py").is_file():
            return path / f"{part}.py"
        if not (path / part).is_dir():
            break
        path /= part
    return path / "__init__.py"


def imported_places(path: Path) -> set[str]:
    found = {place_of(each) for each in imported_files(path) if each != PACKAGE / "__init__.py"}
    return found - {place_of(path)}


def rooms() -> dict[str, set[str]]:
    """Each folder of the package, and the other ones that it imports from."""
    found: dict[str, set[str]] = {}
    for path in sources():
        if path.parent != PACKAGE:
            room = place_of(path).split("/")[0]
            others = {place_of(each).split("/")[0] for each in imported_files(path) if each.parent != PACKAGE}
            found.setdefault(room, set()).update(others - {room})
    return found


def floors(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms by floor, the lowest first: each imports from floors below its own alone. Raises `CycleError`."""
    level: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        level[room] = 1 + max((level[other] for other in arrows[room]), default=-1)
    return [sorted(room for room in level if level[room] == floor) for floor in range(1 + max(level.values()))]


def direct(arrows: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """The arrows that no way over a third room stands for."""

    def below(room: str) -> set[str]:
        return arrows[room].union(*map(below, arrows[room]))

    for room, others in sorted(arrows.items()):
        for other in sorted(others - set().union(*map(below, others))):
            yield room, other


def drawn() -> str:
    """An SVG of the rooms, the lowest floor at the bottom, and of the direct arrows between them, behind the rooms."""
    arrows = rooms()
    pairs, stack = list(direct(arrows)), floors(arrows)[::-1]
    boxes: dict[str, Box] = {}
    for number, floor in enumerate(stack):
        width = (WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)) / len(floor)
        for index, room in enumerate(sorted(floor, key=partial(_middle_above, pairs, boxes))):
            boxes[room] = Box(MARGIN + index * (width + GAP), MARGIN + number * FLOOR_HEIGHT, width)
    parts = [*(_arrow(boxes[room], boxes[other]) for room, other in pairs), *starmap(_room, boxes.items())]
    height = 2 * MARGIN + FLOOR_HEIGHT * len(stack) - (FLOOR_HEIGHT - ROOM_HEIGHT)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    title = "<title>Rooms of the package: each imports only from floors below it</title>"
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0 0 L8 4 L0 8 z" style="fill:#778;stroke:none;marker-end:none"/></marker>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", f"<defs>{tip}</defs>", *parts, "</svg>\n"])


def _middle_above(pairs: Sequence[tuple[str, str]], boxes: Mapping[str, Box], room: str) -> tuple[float, str]:
    """Where the rooms are that point to this one, so that it stands below them."""
    above = [boxes[other].middle for other, below in pairs if below == room]
    return (mean(above) if above else 0.0), room


def _arrow(box: Box, other: Box) -> str:
    """Dashed, and beside the middle, where it passes behind the rooms of another floor."""
    passes = other.top - box.top > FLOOR_HEIGHT
    to = other.middle + 60 * passes
    start = min(max(to, box.left + 30), box.left + box.width - 30)  # straight down where it can be
    top, end = box.top + ROOM_HEIGHT, other.top - 2
    kind = ' class="passes"' if passes else ""
    return f'<path{kind} d="M{start:.0f} {top} C{start:.0f} {top + 30} {to:.0f} {end - 30} {to:.0f} {end}"/>'


def _room(room: str, box: Box) -> str:
    """Its box, its name, and the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    lines = wrap(text.partition("\n\n")[0].partition(". ")[0].rstrip("."), int(box.width / 6.6))[:2]
    words = "".join(
        f'<text x="{box.middle:.0f}" y="{box.top + 44 + 17 * number:.0f}" text-anchor="middle">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    kind = ' class="lab"' if room == LAB else ""
    return (
        f'<rect{kind} x="{box.left:.0f}" y="{box.top}" width="{box.width:.0f}" height="{ROOM_HEIGHT}"/>'
        f'<text class="name" x="{box.middle:.0f}" y="{box.top + 24}" text-anchor="middle">{room}/</text>{words}'
    )
