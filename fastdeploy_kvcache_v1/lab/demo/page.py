"""The demo's page, and README's picture: one drawing code, one result."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ... import __version__
from ...telemetry.drawing import STYLE, Band, Bar, Cell, Figure, Part, bars, cell_map, legend, seconds, swatch
from .findings import NO_SOONER, again, differences, headlines, totals
from .observer import TIERS, Results, Seen
from .scenario import ASKED, BLOCK_SIZE, COMPUTED, HOST, LARGE, RESTARTED, SMALL, Setup

WIDTH = 350
"""Of the page's figures: they fit a phone."""
PICTURE_WIDTH = 900

TITLE = "What the KV cache is worth"
FIRST_TOKENS = "Time to the first token, known document"
SOURCES = "Where the prompt tokens came from"

SOURCE_KINDS = ("computed", "device", "host", "disk")
SOURCE_LEGEND = tuple((Cell(kind), kind) for kind in SOURCE_KINDS)
SERVED_BY = {COMPUTED: "computed", SMALL: "device", LARGE: "device", HOST: "host", RESTARTED: "disk"}
"""Where a known document comes from, by set-up."""
TIME_WORDS = {
    "waiting": "waiting",
    "disk": "loading from disk",
    "host": "copying from the host",
    "computed": "computing the prompt",
    "rest": "the rest: reading the text, sending the token",
}
MAP_LEGEND = (
    (Cell("document"), "document"),
    (Cell("chat"), "chat"),
    (Cell("free"), "free"),
    (Cell("disk"), "on disk only"),
    (Cell("document", True), "a hit of this request"),
)

PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;padding:12px;max-width:1500px;background:var(--paper);color:var(--ink);
  font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:28px;line-height:1.2;margin:12px 0}h2{font-size:21px;margin:32px 0 4px}h3{font-size:17px;margin:0}
p{margin:6px 0;max-width:75ch}svg{display:block;width:100%;height:auto;max-width:440px}
.key{display:inline-flex;align-items:center;gap:6px;margin-right:16px}.key svg{width:13px}.legend{font-size:14px}
.quiet{color:var(--quiet)}.grid{display:grid;gap:28px;grid-template-columns:repeat(auto-fit,minmax(min(350px,100%),1fr))}
.number{font-size:30px;font-weight:600;white-space:nowrap}
.card{border-top:3px solid var(--line);padding-top:10px}.card h4{margin:14px 0 2px;font-size:14px;color:var(--quiet)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;overflow-wrap:break-word}
td,th{padding:3px 10px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;white-space:nowrap}
summary{cursor:pointer;padding:8px 0}details{border-top:1px solid var(--line)}code{font-size:13px}
"""


def write_page(path: Path, setups: Sequence[Setup], results: Results) -> None:
    """One HTML document that needs no other file and no script. Raises `OSError`."""
    body = "\n".join((*_summary(results), *_requests(setups, results), *_details(setups, results)))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{TITLE}</title><style>{STYLE}{PAGE_STYLE}</style>"
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'
    path.write_text(page, encoding="utf-8")


def write_picture(path: Path, results: Results) -> None:
    """README's picture as SVG; the same results make the same file. Raises `OSError`."""
    figure, column = Figure(PICTURE_WIDTH), (PICTURE_WIDTH - 72) / 2
    for x, title, chart in (
        (16, FIRST_TOKENS, _first_tokens(results, column)),
        (56 + column, SOURCES, _sources(results, column)),
    ):
        figure.text(x, 30, title, "title")
        figure.place(chart, x, 46)
        figure.height = max(figure.height, chart.height + 46)
    _place_keys(figure, SOURCE_LEGEND, 56 + column, 104)
    drawn = _map(results[HOST], PICTURE_WIDTH - 32, 2 * _per_row(results))
    if drawn is not None:
        title = f"{HOST}: each tier after each request (a square is a block of {BLOCK_SIZE} tokens)"
        figure.text(16, figure.height + 20, title, "title")
        figure.place(drawn, 16, figure.height + 40)
        figure.height += drawn.height + 44
        _place_keys(figure, [entry for entry in MAP_LEGEND if entry[0].kind != "disk"], 16, 170)
    path.write_text(figure.svg(_spoken(results), STYLE) + "\n", encoding="utf-8")


def _place_keys(figure: Figure, entries: Iterable[tuple[Cell, str]], x: float, width: float) -> None:
    """A line of the legend at its foot, each entry `width` wide."""
    for cell, words in entries:
        figure.place(swatch(cell), x, figure.height + 6)
        figure.text(x + 18, figure.height + 17, words)
        x += width
    figure.height += 32


def _spoken(results: Results) -> str:
    return f"{FIRST_TOKENS}: " + ", ".join(f"{name} {seconds(value)}" for name, value in again(results).items())


def _summary(results: Results) -> Iterable[str]:
    yield f"<h1>{TITLE}</h1>"
    yield _p(
        "Three questions about a long document alternate with three turns of a chat about a letter. "
        "The same six requests went to five set-ups of one server, one request at a time."
    )
    different = differences(results)
    yield _p(" ".join(different) or "All answers are the same in all set-ups: the cache changes no token.")
    yield '<h2>A question about a known document</h2><p class="quiet">Time to the first token</p><div class="grid">'
    for numbers, words in headlines(results):
        yield f'<div><div class="number">{escape(numbers)}</div>{_p(words)}</div>'
    yield "</div>"
    if all(NO_SOONER in words for _, words in headlines(results)):
        yield _p("This model computes next to nothing, so a hit saves no time here.")
    yield '<div class="grid" style="margin-top:28px">'
    yield f"<div><h3>{FIRST_TOKENS}</h3>{_first_tokens(results, WIDTH).svg(_spoken(results))}</div>"
    chart = _sources(results, WIDTH).svg(SOURCES) + legend(SOURCE_LEGEND)
    yield f"<div><h3>{SOURCES}</h3>{chart}</div></div>"


def _first_tokens(results: Results, width: float) -> Figure:
    found = again(results)
    rows = [Bar(name, [Part(value, SERVED_BY[name], seconds(value))], seconds(value)) for name, value in found.items()]
    return bars(rows, width=width, most=max(found.values()), unit=lambda value: f"{value:g} s")


def _sources(results: Results, width: float) -> Figure:
    rows = [
        Bar(name, [Part(n, kind, f"{n:,} {kind}") for n, kind in zip(counts, SOURCE_KINDS, strict=True)], "")
        for name, counts in totals(results).items()
    ]
    most = max(sum(counts) for counts in totals(results).values())
    return bars(rows, width=width, most=most, unit=lambda value: f"{value:,.0f}")


def _requests(setups: Sequence[Setup], results: Results) -> Iterable[str]:
    yield '<h2>Request by request</h2><div class="grid" style="margin-top:16px">'
    yield f'<div class="card"><h3>How to read this</h3>{"".join(_explained(results))}</div>'
    most = max(each.answer.first_token_s for seen in results.values() for each in seen)
    for setup in setups:
        seen = results[setup.name]
        yield f'<div class="card"><h3>{escape(setup.name)}</h3>{_p(setup.explanation)}<h4>Time to the first token</h4>'
        yield _time_lines(seen, most).svg(f"Time to the first token of each request, {setup.name}")
        drawn = _map(seen, WIDTH, _per_row(results))
        words = f"Blocks in each tier after each request, {setup.name}"
        yield "<h4>Blocks after each request</h4>" + (drawn.svg(words) if drawn else _p("No block is kept."))
        yield "</div>"
    yield "</div>"


def _explained(results: Results) -> Iterable[str]:
    yield _p("A bar is the time from sending a request to its first token. All bars have one scale.")
    if any(each.times for seen in results.values() for each in seen):
        yield legend((Cell(kind), words) for kind, words in TIME_WORDS.items())
    else:
        yield _p("This server does not report where the time of a single request went, so the bars have one part.")
    yield _p(
        f"A square is one block of {BLOCK_SIZE} tokens, in one slot of a tier. A column shows the tiers after one "
        "request. A square that changes its colour was evicted. The percentage is the share of the prompt found."
    )
    yield legend(MAP_LEGEND)


def _time_lines(seen: Sequence[Seen], most: float) -> Figure:
    rows = [
        Bar(label, _time_parts(each), seconds(each.answer.first_token_s))
        for label, each in zip(ASKED, seen, strict=True)
    ]
    return bars(rows, width=WIDTH, most=most, unit=lambda value: f"{value:g} s")


def _time_parts(seen: Seen) -> list[Part]:
    if not seen.times:
        return [Part(seen.answer.first_token_s, "other", seconds(seen.answer.first_token_s))]
    names = ("queue_s", "storage_s", "copies_s", "prefill_s")
    values = [seen.times[name] or 0.0 for name in names]
    values.append(max(0.0, seen.answer.first_token_s - sum(values)))
    return [
        Part(value, kind, f"{words}: {seconds(value)}")
        for value, (kind, words) in zip(values, TIME_WORDS.items(), strict=True)
    ]


def _per_row(results: Results) -> int:
    """Cells in a row of a map, the same for all set-ups: up to six rows of large cells."""
    tiers = [cells for seen in results.values() for each in seen for cells in each.tiers.values()]
    most = max((len(_trimmed(cells)) for cells in tiers), default=0)
    return next((count for count in range(4, 8) if most <= 6 * count), 8)


def _map(seen: Sequence[Seen], width: float, per_row: int) -> Figure | None:
    """None where no block is kept."""
    bands = []
    for tier in TIERS:
        columns = [each.tiers.get(tier, []) for each in seen]
        used, size = max(len(_trimmed(column)) for column in columns), max(map(len, columns))
        shown = min(size, -(-used // per_row) * per_row)
        if used:
            count = "" if tier == "disk" else f", {size:,} slots" + (f", the first {shown}" if shown < size else "")
            bands.append(Band(tier + count, [column[:shown] for column in columns]))
    heads = [
        (label.replace("document", "doc"), f"{each.answer.cached_tokens / each.answer.prompt_tokens:.0%}")
        for label, each in zip(ASKED, seen, strict=True)
    ]
    return cell_map(heads, bands, width=width, per_row=per_row) if bands else None


def _trimmed(column: Sequence[Cell]) -> Sequence[Cell]:
    """Without the free cells at its end."""
    return column[: max((number + 1 for number, cell in enumerate(column) if cell.kind != "free"), default=0)]


def _details(setups: Sequence[Setup], results: Results) -> Iterable[str]:
    yield "<h2>Details</h2>"
    answers = (each.answer.text for each in results[COMPUTED])
    said = ((*asked, answer) for asked, answer in zip(ASKED.items(), answers, strict=True))
    yield _folded("Questions and answers", _table(("request", "question", "answer"), said))
    heads = ("set-up", "request", "tokens", *SOURCE_KINDS, "first token, s", *(f"{kind}, s" for kind in TIME_WORDS))
    numbers = [
        (name, label, *(f"{count:,}" for count in (sum(each.sources), *each.sources)), *_written(each))
        for name, seen in results.items()
        for label, each in zip(ASKED, seen, strict=True)
    ]
    yield _folded("Tokens and seconds in numbers", _table(heads, numbers, first_number=2))
    flags = [(setup.name, " ".join(setup.flags)) for setup in setups]
    yield _folded("Flags of each set-up", _table(("set-up", "flags of fastdeploy-kvcache serve"), flags))
    machine = f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    yield _p(f"Made by ./scripts/demo of fastdeploy-kvcache-v1 {__version__} on {machine}.", "quiet")


def _written(seen: Seen) -> list[str]:
    values = {part.kind: part.value for part in _time_parts(seen)}
    parts = (f"{values[kind]:.3f}" if kind in values else "" for kind in TIME_WORDS)
    return [f"{seen.answer.first_token_s:.3f}", *parts]


def _folded(title: str, inner: str) -> str:
    return f'<details><summary>{escape(title)}</summary><div class="scroll">{inner}</div></details>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], first_number: int = 99) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        marks = ("" if place < first_number else ' class="n"' for place in range(len(cells)))
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<table><tr>{row(heads, 'th')}</tr>{body}</table>"


def _p(words: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(words)}</p>' if words else ""
