"""Where a run stands in the order of each tier, and who reads its host slots from outside the two tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Run


class Link:
    """A place in the order of a tier; in no queue while it has no neighbours."""

    __slots__ = ("older", "younger")

    run: Run
    """Whose place it is."""

    def __init__(self) -> None:
        self.older: Link | None = None
        self.younger: Link | None = None

    @property
    def is_queued(self) -> bool:
        return self.younger is not None

    def is_next_to(self, other: Link) -> bool:
        """Is `other` the next younger one, or are both in no queue?"""
        return self.younger is (other if other.is_queued else None)


class HostCopy(Link):
    """That a run has host slots, and its place in the host queue."""

    __slots__ = ("readers", "run")

    def __init__(self, run: Run) -> None:
        self.older = self.younger = None
        self.run = run
        self.readers: tuple[HostReader, ...] = ()
        """From outside the two tiers: the slots stay as they are until these have ended."""


class HostReader:
    """Reads host slots from outside the two tiers."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        self.copies: list[HostCopy] = []
        """What it reads; a copy that is cut while it is read counts with both its parts."""
