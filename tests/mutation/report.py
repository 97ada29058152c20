"""The table in docs/develop/testing.md, and what is known about survivors.

A judged survivor stands in `judged/FOLDER.txt`: the line that `scripts/mutate` printed, without its line number, and
below it, indented, why no test need notice it (`equal: ...`, `speed: ...`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from tests.mutation.driver import ROOT, Verdict

DOCUMENT = ROOT / "docs/develop/testing.md"
JUDGED = Path(__file__).with_name("judged")
HEADER = "| folder | places | tried | killed | judged | survivors |\n|---|---|---|---|---|---|\n"


def judgements(folder: str) -> dict[str, str]:
    """Why each survivor of the folder may survive, by its key."""
    path = JUDGED / f"{folder}.txt"
    known, key = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.startswith(" "):
            known[key] = line.strip()
        elif line and not line.startswith("#"):
            key = line
    return known


def row(folder: str, places: int, verdicts: Sequence[Verdict]) -> str:
    """A line of the table. `killed` is a share of those that a test could notice: the judged ones are left out."""
    known = judgements(folder)
    survivors = [verdict for verdict in verdicts if not verdict.killers]
    judged = sum(verdict.place.key in known for verdict in survivors)
    killed = len(verdicts) - len(survivors)
    share = f"{killed} ({100 * killed / max(1, len(verdicts) - judged):.0f} %)"
    return f"| `{folder}` | {places} | {len(verdicts)} | {share} | {judged} | {len(survivors) - judged} |"


def write(rows: dict[str, str]) -> None:
    """Replaces these folders' lines of the table, and leaves the others."""
    before, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(HEADER)
    if not begin:
        raise SystemExit(f"error: {DOCUMENT} has no table that begins with:\n{HEADER}")
    table = list(takewhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True)))
    known = {line.split("`")[1]: line for line in table} | {folder: f"{line}\n" for folder, line in rows.items()}
    lines, after = "".join(known[folder] for folder in sorted(known)), rest[len("".join(table)) :]
    DOCUMENT.write_text(f"{before}{HEADER}{lines}{after}", encoding="utf-8")
