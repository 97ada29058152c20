"""Writes docs/benchmarks.md from `benchmarks/results/`, between its markers: `benchmarks/tables.py [COMMIT]`.

The page names the commit for which its ages hold (default: HEAD), because any later one may make a result older.
"""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Any

from _support import ROOT, git
from programs import PROGRAMS, Program, age, other_marks
from rows import Table, tables_of

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: written by ./scripts/bench -->", "<!-- end of results -->"
AS_OF = re.compile(r"^Ages as of commit ([0-9a-f]+)\.$", re.MULTILINE)
AGES = re.compile(r"(older than the code|unknown commit)(; )?")


def written(until: str, ages: bool) -> str:
    """All that is generated. Ages are as of the commit `until`; without `ages`, git is not asked."""
    parts = [
        f"Ages as of commit {until}.",
        overview(until, ages),
        *(section(each, until, ages) for each in PROGRAMS.values()),
    ]
    return "\n\n".join(parts)


def overview(until: str, ages: bool) -> str:
    """One row a benchmark: how many targets are met, and the marks of its result."""
    lines = ["| benchmark | targets met | marks of the result |", "|---|---|---|"]
    for program in PROGRAMS.values():
        if result := program.result():
            judged = [row for table in tables_of(program.name, result) for row in table.rows if row.target is not None]
            met = f"{sum(not row.is_missed for row in judged)} of {len(judged)}" if judged else "no targets"
            anchor = re.sub(r"[^\w -]", "", program.title.lower()).replace(" ", "-")
            lines.append(f"| [{program.title}](#{anchor}) | {met} | {marks(program, result, until, ages)} |")
    return "\n".join(lines)


def marks(program: Program, result: dict[str, Any], until: str, ages: bool) -> str:
    found = [age(program, result, until) if ages else "", *other_marks(result)]
    return "; ".join(filter(None, found)) or "none"


def section(program: Program, until: str, ages: bool) -> str:
    parts = [f"## {program.title}", wrapped(program.about()), f"    {program.command}"]
    result = program.result()
    if result is None:
        why = "It keeps no result." if not program.keeps else "Not measured yet."
        return "\n\n".join([*parts, f"{why} Needs {program.needs}." if program.needs else why])
    facts = [
        f"over: {program.runs_over}",
        f"command: {result['command'] or 'unknown'}",
        f"commit: {commit_text(result)}, {result['when'] or 'unknown time'}",
        f"machine: {machine_text(result['machine'])}",
        f"load average: {load_text(result['load'])}",
        *([f"trace: {result['trace']}"] if "trace" in result else []),
        *([f"note: {result['note']}"] if "note" in result else []),
        f"marks: {marks(program, result, until, ages)}",
    ]
    parts.append("\n".join(wrapped(f"- {fact}", "  ") for fact in facts))
    for table in tables_of(program.name, result):
        if table.title:
            parts.append(f"### {table.title}")
        parts.append(markdown(table))
    return "\n\n".join(parts)


def markdown(table: Table) -> str:
    return "\n".join(["| what | measured | target |", "|---|---|---|", *map(str, table.rows)])


def commit_text(result: dict[str, Any]) -> str:
    clean = {True: "clean tree", False: "dirty tree", None: "tree unknown"}[result["clean"]]
    return f"{(result['commit'] or 'unknown')[:8]}, {clean}"


def machine_text(machine: dict[str, Any] | None) -> str:
    if machine is None:
        return "unknown"
    memory = f"{machine['memory_gib']:.0f} GiB" if machine["memory_gib"] else "memory unknown"
    return f"{machine['cpu']}, {machine['cores']} cores, {memory}, Python {machine['python']}, {machine['system']}"


def load_text(load: dict[str, float | None] | None) -> str:
    if load is None:
        return "any, for nothing is timed"
    return ", ".join(f"{'unknown' if value is None else f'{value:.2f}'} {name}" for name, value in load.items())


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page(text: str, until: str, *, ages: bool = True) -> str:
    """`text` of the page with its generated part as of `until`. Raises `ValueError` where a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN!r} or {END!r}")
    return f"{before}{begin}\n\n{written(until, ages)}\n\n{end}{after}"


def without_ages(text: str) -> str:
    """`text` without ages, and without white space."""
    flat = " ".join(AS_OF.sub("", text).split())
    return "".join(AGES.sub("", flat).replace("none", "").split())


def main(commit: str = "HEAD") -> None:
    until = git("rev-parse", "--short=8", commit) or "0"
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), until), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main(*sys.argv[1:])
