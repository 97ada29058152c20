"""Mistakes that tests must notice, told in a text file as a small patch.

    # what is wrong
    > file
    by tests that notice it, where the world does not
    -text that stands there once
    +text in its place

More lines of a kind are one text. A `-` behind a `+` begins another place of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    name: str
    file: str
    places: tuple[tuple[str, str], ...]
    """Was, now."""
    tests: str = ""
    """Those that notice it; empty for the world."""

    def applied_to(self, text: str) -> str:
        """Raises `LookupError` when a text is not in `text`, once."""
        for was, now in self.places:
            if text.count(was) != 1:
                raise LookupError(f"{self.file} has {text.count(was)} times, not once: {was!r}")
            text = text.replace(was, now)
        return text


def read(path: Path) -> list[Change]:
    found = []
    for entry in path.read_text(encoding="utf-8").split("\n# ")[1:]:
        name, file, *lines = entry.splitlines()
        places: list[tuple[list[str], list[str]]] = []
        for sign, text in ((line[0], line[1:]) for line in lines if line[:1] in ("-", "+")):
            if sign == "-" and (not places or places[-1][1]):
                places.append(([], []))
            places[-1]["-+".index(sign)].append(text)
        tests = next((line[3:] for line in lines if line.startswith("by ")), "")
        texts = tuple(("\n".join(was), "\n".join(now)) for was, now in places)
        found.append(Change(name, file.removeprefix("> "), texts, tests))
    return found
