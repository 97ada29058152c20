"""Run: a stretch of consecutive cached blocks that share one fate, and the LRU queue of a tier.

The prefix tree is made of runs, not of single blocks. All blocks of a run are in the same tiers, pinned by the same
requests and hit equally often; when that would stop being true, the run is split first. Chained hashes make this
cheap: two runs agree up to their last block if and only if their last hashes agree. So pinning, ordering and evicting
cost O(runs), while `BlockNode` stays the view of a single block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from .errors import InvariantError
from .metadata import BlockHash, BlockNode, CacheLevel, DeviceSlot, HostSlot, NodeSpan

_NO_CHILDREN: dict[BlockHash, Run] = {}
"""What every leaf shares, because most runs are leaves. Never written: `Run.add_child` replaces it."""


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
        self.children = _NO_CHILDREN
        """By the hash of their first block; read-only, see `add_child`."""
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

    def add_child(self, child: Run) -> None:
        """Hang `child` below this run, in place of the one that starts with the same block."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child.hashes[0]] = child

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
        """Could it be one run with its parent?"""
        parent = self.parent
        return (
            parent is not None
            and parent.parent is not None
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
        """Is the parent the next younger one in every queue that holds either of them?"""
        parent = self.parent
        return (
            parent is not None
            and (self.device_link and self.device_link.next) is parent.device_link
            and (self.host_link and self.host_link.next) is parent.host_link
        )

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
    """Runs of one tier, least recently used first: a linked list, so that the half of a split run gets its place.

    A run that cannot be evicted now may be taken out when it gets in the way, and comes back when that changes. So
    looking for a victim costs O(1) amortized, however many runs are in use.
    """

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
        """Make it the most recently used, queued or not."""
        link: Link | None = getattr(run, self._slot)
        end = self._end
        if link is None:
            self._insert_before(end, run)
        elif link.next is not end:
            link.prev.next, link.next.prev = link.next, link.prev
            link.prev, link.next = end.prev, end
            end.prev.next = link
            end.prev = link

    def discard(self, run: Run) -> None:
        """Take it out if it is queued."""
        link: Link | None = getattr(run, self._slot)
        if link is None:
            return
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


# ---- what always holds, written out for the tree's `check()`


def expect(condition: bool, broken: str) -> None:
    """Raises `InvariantError` with the text `broken` unless `condition`."""
    if not condition:
        raise InvariantError(broken)


def check_runs(runs: Sequence[Run], detached: Set[Run], transfers: Set[Run]) -> None:
    """`runs` is the whole tree, parents before children; `transfers` are the runs with an open copy."""
    for run in runs:
        _check_lists(run)
        _check_place(run)
        expect(not run.detached, "a detached run is findable")
    # Detached runs exist only for their last users.
    for run in detached:
        _check_lists(run)
        expect(run.detached and (run.pins > 0 or run.open is not None), "a detached run has no user left")
    # A block has one node.
    hashes = [block for run in runs for block in run.hashes]
    expect(len(hashes) == len(set(hashes)), "one block is in the tree twice")
    # Exactly the runs with an open copy are known as such.
    expect(transfers == {run for run in (*runs, *detached) if run.open is not None}, "open transfers and runs disagree")


def check_queue(queue: RunQueue, in_tier: Set[Run], elsewhere: Set[Run], tier: str) -> None:
    """The LRU queue of a tier holds its findable runs, each at most once, and misses none that can be evicted."""
    queued = list(queue)
    expect(len(queued) == len(queue) == len(set(queued)), f"the {tier} queue lost count")
    expect(in_tier >= set(queued), f"the {tier} queue holds runs that are not in its tier")
    missing = in_tier - set(queued) - elsewhere
    expect(all(run.pins for run in missing), f"the {tier} queue misses runs that nobody uses")


def _check_place(run: Run) -> None:
    parent = run.parent
    assert parent is not None
    expect(parent.children.get(run.hashes[0]) is run, "a run is not its parent's child by its first hash")
    # A pinned run has pinned ancestors; a device run has device ancestors.
    expect(run.pins >= sum(child.pins for child in run.children.values()), "a run is pinned less than its children")
    on_device_above = parent.is_root or parent.device is not None
    expect(run.device is None or on_device_above, "a device block hangs below a block that is not on the device")
    expect(run.open is not CacheLevel.DEVICE or run.pins > 0, "a swap-in is open that nobody waits for")


def _check_lists(run: Run) -> None:
    """A run has blocks, is in a tier, and its lists agree in length; an open copy fills a tier it is in."""
    expect(bool(run.hashes), "a run has no blocks")
    expect(run.device is not None or run.host is not None, "a run is in no tier")
    expect(run.device is None or len(run.device) == len(run.hashes), "device slots and hashes differ in number")
    expect(run.host is None or len(run.host) == len(run.hashes), "host slots and hashes differ in number")
    expect(run.open is None or run.host is not None, "an open copy has no host slots")
    expect(run.open is not CacheLevel.DEVICE or run.device is not None, "a swap-in has no device slots")
