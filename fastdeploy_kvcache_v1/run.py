"""Run: a stretch of consecutive cached blocks that share one fate, and the LRU queue of a tier.

The prefix tree is made of runs, not of single blocks. All blocks of a run are in the same tiers, pinned by the same
requests and hit equally often; when that would stop being true, the run is split first. Chained hashes make this
cheap: two runs agree up to their last block if and only if their last hashes agree. So pinning, ordering and evicting
cost O(runs), while `BlockNode` stays the view of a single block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .errors import InvariantError
from .metadata import BlockHash, BlockNode, CacheLevel, DeviceSlot, HostSlot, NodeSpan


class Link:
    """Place of one run in one queue."""

    __slots__ = ("next", "prev", "run")

    def __init__(self, run: Run | None = None) -> None:
        self.run = run
        self.prev: Link = self
        self.next: Link = self


class Run:
    """Blocks `hashes[0..n)`; `device[i]` and `host[i]` are the slots of block i, None where the run is not.

    The lists are only ever appended to or replaced, so a `NodeSpan` that holds them keeps its first n entries.
    """

    __slots__ = (
        "children",
        "detached",
        "device",
        "device_link",
        "hashes",
        "hits",
        "host",
        "host_link",
        "open",
        "parent",
        "pins",
    )

    def __init__(
        self,
        hashes: list[BlockHash],
        device: list[DeviceSlot] | None = None,
        host: list[HostSlot] | None = None,
        parent: Run | None = None,
    ) -> None:
        self.hashes = hashes
        self.device = device
        self.host = host
        self.parent = parent
        self.children: dict[BlockHash, Run] = {}
        """By the hash of their first block."""
        self.pins = 0
        """Requests that use this run or one below it."""
        self.hits = 0
        self.open: CacheLevel | None = None
        """Tier a copy is filling that the worker has not been told of yet."""
        self.detached = False
        self.device_link: Link | None = None
        self.host_link: Link | None = None

    def __len__(self) -> int:
        return len(self.hashes)

    def __bool__(self) -> bool:
        return True

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_device_evictable(self) -> bool:
        return not self.pins and self.device is not None and not self.detached

    @property
    def is_host_evictable(self) -> bool:
        return not self.pins and self.host is not None and self.open is None and not self.detached

    def span(self) -> NodeSpan:
        return NodeSpan(
            self.hashes, self.device, self.host, len(self.hashes), self.open, self.detached, self.hits, self.pins
        )

    def nodes(self) -> Iterator[BlockNode]:
        return self.span().nodes()

    def common_blocks(self, hashes: Sequence[BlockHash], start: int, count: int) -> int:
        """How many of its first `count` blocks equal `hashes[start:]`, knowing the first does. O(log count)."""
        mine = self.hashes
        if mine[count - 1] == hashes[start + count - 1]:
            return count
        low, high = 1, count - 1  # block low-1 agrees, block high disagrees
        while low < high:
            middle = (low + high) // 2
            if mine[middle] == hashes[start + middle]:
                low = middle + 1
            else:
                high = middle
        return low


class RunQueue:
    """Runs of one tier, least recently used first: a linked list, so that the half of a split run gets its place."""

    def __init__(self, level: CacheLevel) -> None:
        self._slot = f"{level.value}_link"
        self._end = Link()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Run]:
        """Oldest first. The run just yielded may be removed or moved by the caller."""
        link = self._end.next
        while link.run is not None:
            following = link.next
            yield link.run
            link = following

    def append(self, run: Run) -> None:
        self._insert_before(self._end, run)

    def insert_after(self, run: Run, other: Run) -> None:
        """Put `run` one place younger than `other`."""
        link: Link = getattr(other, self._slot)
        self._insert_before(link.next, run)

    def touch(self, run: Run) -> None:
        """Make it the most recently used."""
        link: Link = getattr(run, self._slot)
        end = self._end
        if link.next is not end:
            link.prev.next, link.next.prev = link.next, link.prev
            link.prev, link.next = end.prev, end
            end.prev.next = link
            end.prev = link

    def remove(self, run: Run) -> None:
        link: Link = getattr(run, self._slot)
        link.prev.next, link.next.prev = link.next, link.prev
        setattr(run, self._slot, None)
        self._length -= 1

    def _insert_before(self, place: Link, run: Run) -> None:
        if getattr(run, self._slot) is not None:
            raise InvariantError(f"{self._slot}: run queued twice")
        link = Link(run)
        link.prev, link.next = place.prev, place
        place.prev.next = link
        place.prev = link
        setattr(run, self._slot, link)
        self._length += 1
