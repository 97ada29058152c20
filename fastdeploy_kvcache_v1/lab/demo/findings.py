"""Findings of the demo, in sentences."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from ...telemetry.drawing import seconds
from .observer import Results
from .scenario import ASKED, COMPUTED, HOST, LARGE, RESTARTED, SMALL

SHOWN = {LARGE: "the device", HOST: "host memory", RESTARTED: "disk, after a restart"}
"""Where the blocks of the document are, by set-up."""
NO_SOONER = "no sooner"


class Headline(NamedTuple):
    numbers: str
    words: str


def again(results: Results) -> dict[str, float]:
    """Seconds to the first token of a question about a document that was asked about before, by set-up.

    The median of the second and the third question; after a restart, the first question.
    """
    firsts = {name: [each.answer.first_token_s for each in seen] for name, seen in results.items()}
    return {name: all_s[0] if name == RESTARTED else median(all_s[2::2]) for name, all_s in firsts.items()}


def totals(results: Results) -> dict[str, tuple[int, ...]]:
    """Prompt tokens by source, see `Seen.sources`."""
    return {name: tuple(map(sum, zip(*(each.sources for each in seen), strict=True))) for name, seen in results.items()}


def headlines(results: Results) -> list[Headline]:
    found = again(results)
    return [
        Headline(f"{seconds(found[COMPUTED])} → {seconds(found[name])}", f"from {where} ({_sooner(found, name)})")
        for name, where in SHOWN.items()
    ]


def _sooner(found: dict[str, float], name: str) -> str:
    ratio = found[COMPUTED] / found[name]
    return f"{ratio:.0f}x sooner" if ratio >= 1.5 else NO_SOONER


def verdicts(results: Results) -> list[str]:
    """One sentence per finding."""
    computed = {name: counts[0] for name, counts in totals(results).items()}
    return [
        "First token of a question about a known document: "
        + "; ".join(f"{numbers} {words}" for numbers, words in headlines(results)),
        f"A device tier too small for document and chat computes {computed[SMALL]:,} prompt tokens; "
        f"with host memory behind it, {computed[HOST]:,}",
        *(differences(results) or ["All answers are the same in all set-ups"]),
    ]


def differences(results: Results) -> list[str]:
    """One line per answer that differs from the server's without a cache."""
    return [
        f"{name}, {label}: got {each.answer.text!r}, expected {expected.answer.text!r}"
        for name, seen in results.items()
        for label, each, expected in zip(ASKED, seen, results[COMPUTED], strict=True)
        if each.answer.text != expected.answer.text
    ]
