"""What the demo shows, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from .player import Outcome
from .setups import COMPUTED, HOST, LARGE, SMALL

Results = Mapping[str, Sequence[Outcome]]
"""Outcomes in the order of the requests, by the name of the set-up."""


def verdicts(results: Results) -> list[str]:
    """One sentence per finding."""
    computed, device, host = (_repeated(results[name]) for name in (COMPUTED, LARGE, HOST))
    small, with_host = (sum(outcome.computed_tokens for outcome in results[name]) for name in (SMALL, HOST))
    return [
        f"A question about a document that the server knows: first token after {device:.2f} s from the device tier and "
        f"{host:.2f} s from the host tier, {computed:.2f} s without a cache ({computed / device:.0f}x and "
        f"{computed / host:.0f}x sooner)",
        f"With a device tier too small for document and chat, {small:,} prompt tokens were computed; with host memory "
        f"behind it, {with_host:,}",
        *(differences(results) or ["All answers are the same in all set-ups"]),
    ]


def _repeated(outcomes: Sequence[Outcome]) -> float:
    """Median time to the first token of the questions about the document, but for the first one."""
    _, *again = (outcome for outcome in outcomes if outcome.label.startswith("document"))
    return median(outcome.first_token_s for outcome in again)


def differences(results: Results) -> list[str]:
    """One line per answer that is not what the server said without a cache."""
    expected = results[COMPUTED]
    return [
        f"{name}, {outcome.label}: {outcome.text!r} instead of {other.text!r}"
        for name, outcomes in results.items()
        for outcome, other in zip(outcomes, expected, strict=True)
        if outcome.text != other.text
    ]
