"""Where a run stands in the order of each tier: its place, and the queues of places."""

from __future__ import annotations

from collections.abc import Iterator
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

    def enter_after(self, other: Link) -> None:
        """It is in no queue, and is put one place younger than `other`, in the queue that holds `other`."""
        younger = other.younger
        assert younger is not None and not self.is_queued
        self.older, self.younger = other, younger
        other.younger = younger.older = self

    def leave_queue(self) -> None:
        """Be in no queue any more, if it was in one."""
        older, younger = self.older, self.younger
        if younger is not None:
            assert older is not None
            older.younger, younger.older = younger, older
            self.older = self.younger = None


class HostCopy(Link):
    """That a run has host slots, and its place in the host queue."""

    __slots__ = ("is_double", "run")

    def __init__(self, run: Run) -> None:
        self.older = self.younger = None
        self.run = run
        self.is_double = False
        """It is in the queue of `Doubles`."""


class RunQueue:
    """Oldest first: a linked list, so that the half of a split run gets its place. Every method is O(1)."""

    def __init__(self) -> None:
        end = self.end = Link()
        """Between its youngest and its oldest place, always the same: `end.younger` is the oldest, or `end` itself. For
        those who ask often; never moved.
        """
        end.older = end.younger = end

    def __iter__(self) -> Iterator[Run]:
        """Oldest first. The run just yielded may be removed or moved by the caller."""
        link = self.end.younger
        while link is not self.end:
            assert link is not None
            following = link.younger
            yield link.run
            link = following

    def youngest_first(self) -> Iterator[Run]:
        """As `__iter__`, from the other end."""
        link = self.end.older
        while link is not self.end:
            assert link is not None
            following = link.older
            yield link.run
            link = following

    def touch(self, link: Link) -> None:
        """Make it the youngest, whatever queue it is in, or none."""
        end = self.end
        newest = end.older
        if newest is link:
            return
        assert newest is not None
        older, younger = link.older, link.younger
        if younger is not None:
            assert older is not None
            older.younger, younger.older = younger, older
        link.older, link.younger = newest, end
        newest.younger = end.older = link

    def put_oldest(self, link: Link) -> None:
        """Put `link`, which is in no queue, before all others."""
        link.enter_after(self.end)

    def drain(self, *, youngest_first: bool = False) -> Iterator[Link]:
        """Take out all places, one by one."""
        end = self.end
        while (link := end.older if youngest_first else end.younger) is not end:
            assert link is not None
            link.leave_queue()
            yield link

    def forget(self) -> None:
        """Be empty. Places that were in it still look queued: the caller cares for them."""
        end = self.end
        end.older = end.younger = end

    def check_links(self) -> bool:
        """Do all links agree with their neighbours, and does the way back meet the same ones?"""
        link = self.end
        while True:
            younger = link.younger
            if younger is None or younger.older is not link:
                return False
            link = younger
            if link is self.end:
                return True
