"""EngineCounters: what the embedded engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...copy_totals import RankCopies


@dataclass
class EngineCounters:
    """Totals since the start. Written by the engine thread only; any thread may read single fields."""

    copies: tuple[RankCopies, ...] = field(default_factory=lambda: (RankCopies(),))
    """By worker rank."""
    steps: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, those computed again after a preemption included."""
    generated_tokens: int = 0
    draft_tokens: int = 0
    """Guesses that were verified."""
    accepted_draft_tokens: int = 0
    """Those of them that were right and needed."""
    finished: int = 0
    aborted: int = 0
    failed: int = 0
