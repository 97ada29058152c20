"""What is kept of a copy from its submission to its report."""

from __future__ import annotations

from ..contract.messages import CacheSwapMetadata, TransferResult
from .ops import CopyRuns
from .runtime import Event
from .runtime.base import describe

__all__ = ["Transfer"]


class Transfer:
    """The copies of one kind in one step: what was asked, the events that tell how it goes, the one result it gets."""

    def __init__(self, step: int, metadata: CacheSwapMetadata, runs: CopyRuns, num_bytes: int) -> None:
        self.step = step
        self.metadata = metadata
        self.runs = runs
        self.num_bytes = num_bytes
        self.started: Event
        self.finished: Event
        """Both from its submission on."""
        self.layer_events: list[Event] = []
        """One per layer, where it is copied layer by layer; else none."""
        self.given_up: str | None = None
        """Why it was declared failed while still running."""
        self.is_reported = False

    def take_result(self) -> TransferResult | None:
        """Once, when it is known: it has ended or was given up."""
        if self.is_reported or (self.given_up is None and not self.finished.done()):
            return None
        self.is_reported = True
        error = self.given_up
        if error is None and self.finished.error is not None:
            error = describe(self.finished.error)
        return TransferResult(
            step=self.step,
            source=self.metadata.source,
            target=self.metadata.target,
            num_blocks=len(self.metadata),
            num_bytes=self.num_bytes,
            seconds=self.finished.seconds_since(self.started) if self.finished.done() else 0.0,
            target_slots=() if error is None else tuple(self.metadata.target_slots),
            error=error,
        )
