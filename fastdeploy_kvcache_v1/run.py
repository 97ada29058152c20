"""Run: a stretch of consecutive cached blocks that share one fate.

The prefix tree is made of runs, not of single blocks. All blocks of a run are in the same tiers, pinned by the same
requests and hit equally often; when that would stop being true, the run is split first. Chained hashes make this
cheap: two runs agree up to their last block if and only if their last hashes agree. So pinning, ordering and evicting
cost O(runs), while `BlockNode` stays the view of a single block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .metadata import BlockHash, BlockNode, CacheLevel, DeviceSlot, HostSlot, NodeSpan

_NO_CHILDREN: dict[BlockHash, Run] = {}
"""What every leaf shares, because most runs are leaves. Never written: `Run.add_child` replaces it."""


class Link:
    """A place in an LRU queue; in none while it has no neighbours."""

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
    """The host slots of a run, and its place in the host queue."""

    __slots__ = ("run", "slots")

    def __init__(self, run: Run, slots: tuple[HostSlot, ...]) -> None:
        self.older = self.younger = None
        self.run = run
        self.slots = slots


class Run(Link):
    """Blocks `hashes[0..n)`, `device[i]` and `host.slots[i]` their slots; None in a tier where the run is not.

    A run is itself its place in the device queue: most runs are in that tier only, and a cache of one-block runs is
    made of little else. Hashes and slots are tuples, so whoever looked at a run keeps what it saw.
    """

    __slots__ = ("children", "detached", "device", "hashes", "hits", "host", "open", "parent", "pins")

    def __init__(self, hashes: tuple[BlockHash, ...]) -> None:
        self.older = self.younger = None
        self.hashes = hashes
        self.device: tuple[DeviceSlot, ...] | None = None
        self.host: HostCopy | None = None
        self.parent: Run | None = None
        self.children = _NO_CHILDREN
        """By the hash of their first block; read-only, see `add_child`."""
        self.pins = 0
        """Requests that use this run or one below it."""
        self.hits = 0
        self.open: CacheLevel | None = None
        """Tier a copy is filling that the worker has not been told of yet."""
        self.detached = False
        """Can no longer be found, and only waits for its last user."""

    @property
    def run(self) -> Run:  # type: ignore[override]
        return self

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def host_slots(self) -> tuple[HostSlot, ...] | None:
        return None if self.host is None else self.host.slots

    @property
    def parent_hash(self) -> BlockHash | None:
        """Hash of the block before its first one; None at the start of a prompt."""
        return self.parent.hashes[-1] if self.parent and self.parent.hashes else None

    @property
    def is_host_evictable(self) -> bool:
        """Of a run that can be found: may its host copy go?"""
        return not self.pins and self.host is not None and self.open is None

    def add_child(self, child: Run) -> None:
        """Hang `child` below this run, in place of the one that starts with the same block."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child.hashes[0]] = child
        child.parent = self

    def remove_child(self, child: Run) -> None:
        del self.children[child.hashes[0]]

    def device_child(self) -> Run | None:
        """A child that is on the device, if there is one."""
        return next((child for child in self.children.values() if child.device is not None), None)

    def subtree(self) -> Iterator[Run]:
        """This run and everything below it, parents before children."""
        stack = [self]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    def fits_parent(self) -> bool:
        """Could it be one run with its parent? Never with the root, which is in no tier."""
        parent = self.parent
        return (
            parent is not None
            and len(parent.children) == 1
            and parent.pins == self.pins
            and parent.hits == self.hits
            and parent.open is None
            and self.open is None
            and (parent.device is None) == (self.device is None)
            and (parent.host is None) == (self.host is None)
            and not self.detached
        )

    def is_queued_next_to_parent(self) -> bool:
        """Is the parent the next younger one in each tier's queue? They must be in the same tiers."""
        parent = self.parent
        assert parent is not None
        if not self.is_next_to(parent):
            return False
        if self.host is None:
            return True
        assert parent.host is not None
        return self.host.is_next_to(parent.host)

    def span(self) -> NodeSpan:
        return NodeSpan(self.hashes, self.device, self.host_slots, self.open, self.detached, self.hits, self.pins)

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
