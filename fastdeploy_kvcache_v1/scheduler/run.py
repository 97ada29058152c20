"""Run: a stretch of consecutive cached blocks that share one fate.

The prefix tree is made of runs, not of single blocks. All blocks of a run are in the same tiers, pinned by the same
requests and hit equally often; when that would stop being true, the run is split first. Chained hashes make this
cheap: two runs agree up to their last block if and only if their last hashes agree. So pinning, ordering and evicting
cost O(runs).

What is known of each block lies in *cells*, a list with three entries per block: hash, device slot, host slot. A run
is the range `[start, end)` of blocks of such a list. A run that is cut shares the list with its upper part; every block
of a list belongs to one run, and the next range of the list is a child of the run before it. So to cut a run and to
join its parts again is O(1), and to append blocks at the list's end O(blocks appended), however long the run is.

A run also has a place in the order of each tier: a link of a `RunQueue`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from ..contract.messages import BlockHash, CacheLevel, DeviceSlot, HostSlot

Cells = list[Any]
"""`[hash, device slot, host slot]` of block 0, then of block 1, and so on. A slot means nothing in a tier where the run
is not. Cells whose blocks were moved have one entry: the cells where they are, and the place of block 0 there."""

WIDTH = 3
DEVICE = 1
HOST = 2

_NO_CHILDREN: dict[BlockHash, Run] = {}
"""What every leaf shares, because most runs are leaves. Never written: `Run.add_child` replaces it."""


class QueueNode:
    """A place in the order of a tier; in no queue while it has no neighbours."""

    __slots__ = ("older", "younger")

    run: Run
    """Whose place it is."""

    def __init__(self) -> None:
        self.older: QueueNode | None = None
        self.younger: QueueNode | None = None

    @property
    def is_queued(self) -> bool:
        return self.younger is not None

    def is_next_to(self, other: QueueNode) -> bool:
        """Is `other` the next younger one, or are both in no queue?"""
        return self.younger is (other if other.is_queued else None)

    def enter_after(self, other: QueueNode) -> None:
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


class HostCopy(QueueNode):
    """That a run has host slots, and its place in the host queue."""

    __slots__ = ("is_duplicate", "run")

    def __init__(self, run: Run) -> None:
        self.older = self.younger = None
        self.run = run
        self.is_duplicate = False
        """It is in the queue of `HostDuplicates`."""


class Run(QueueNode):
    """A run is itself its place in the device queue: most runs are in that tier only, and a cache of one-block runs is
    made of little else.
    """

    __slots__ = (
        "cells",
        "children",
        "detached",
        "end",
        "hits",
        "host",
        "last_use",
        "num_device_children",
        "on_device",
        "open",
        "parent",
        "pins",
        "start",
        "use_class",
    )

    def __init__(self, cells: Cells, start: int, end: int) -> None:
        self.older = self.younger = None
        self.cells = cells
        self.start = start
        self.end = end
        self.on_device = False
        self.host: HostCopy | None = None
        self.parent: Run | None = None
        self.children = _NO_CHILDREN
        """By the hash of their first block; read-only, see `add_child`."""
        self.num_device_children = 0
        """Children on the device. Of no meaning for the root, and once it is detached."""
        self.pins = 0
        """Requests that use this run or one below it."""
        self.hits = 0
        self.use_class = 0
        """How often requests found these blocks computed before, as a class of `ReuseHistory`."""
        self.last_use = -1
        """When the last request that used it ended, in the time of `ReuseHistory`; -1: none has."""
        self.open: CacheLevel | None = None
        """Tier that a copy is filling of which the worker does not know yet."""
        self.detached = False
        """Can no longer be found, and only waits for its last user."""

    @classmethod
    def of(cls, hashes: Sequence[BlockHash], slots: Sequence[Any], level: CacheLevel = CacheLevel.DEVICE) -> Run:
        """A run with cells of its own for blocks in `slots` of tier `level`."""
        run = cls(_cells(hashes, slots), 0, len(hashes))
        run.on_device = level is CacheLevel.DEVICE
        if not run.on_device:
            run.enter_host(slots)
        return run

    # ---- its blocks

    @property
    def run(self) -> Run:  # type: ignore[override]
        return self

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def hashes(self) -> list[BlockHash]:
        """A copy; O(length)."""
        return self.cells[WIDTH * self.start : WIDTH * self.end : WIDTH]

    def slots(self, tier: int, begin: int, end: int) -> list[Any]:
        """In `DEVICE` or `HOST`, of its blocks at places `[begin, end)` of its cells. A copy; O(end - begin).

        Those on the device are what an open copy to the host reads, also after the run has left the device: the copy
        comes before whatever the slots are used for next.
        """
        return self.cells[WIDTH * begin + tier : WIDTH * end : WIDTH]

    @property
    def device_slots(self) -> list[DeviceSlot]:
        """A copy, empty if it is not on the device; O(length)."""
        return self.cells[WIDTH * self.start + DEVICE : WIDTH * self.end : WIDTH] if self.on_device else []

    @property
    def host_slots(self) -> list[HostSlot]:
        """A copy, empty if it is not on the host; O(length)."""
        return [] if self.host is None else self.cells[WIDTH * self.start + HOST : WIDTH * self.end : WIDTH]

    @property
    def first_hash(self) -> BlockHash:
        block: BlockHash = self.cells[WIDTH * self.start]
        return block

    @property
    def last_hash(self) -> BlockHash:
        block: BlockHash = self.cells[WIDTH * (self.end - 1)]
        return block

    @property
    def parent_hash(self) -> BlockHash | None:
        """Hash of the block before its first one; None at the start of a prompt."""
        parent = self.parent
        return None if parent is None or parent.is_root else parent.last_hash

    @property
    def ends_its_cells(self) -> bool:
        """Can blocks be appended to it, or its blocks be taken off the list?"""
        return WIDTH * self.end == len(self.cells)

    def common_blocks(self, hashes: Sequence[BlockHash], start: int, count: int) -> int:
        """How many of its first `count` blocks equal `hashes[start:]`, knowing the first does. O(log count)."""
        cells, mine = self.cells, self.start
        if cells[WIDTH * (mine + count - 1)] == hashes[start + count - 1]:
            return count

        def differs(at: int) -> bool:
            return bool(cells[WIDTH * (mine + at)] != hashes[start + at])

        return 1 + bisect_left(range(1, count - 1), True, key=differs)

    # ---- its slots; the caller keeps pools, counts and queues

    def enter_device(self, slots: Sequence[DeviceSlot]) -> None:
        assert self.pins and not self.on_device and len(slots) == self.length, "a run in use gets one slot per block"
        self.change_device_slots(slots)
        self.on_device = True
        assert self.parent is not None
        self.parent.num_device_children += 1

    def change_device_slots(self, slots: Sequence[DeviceSlot]) -> list[DeviceSlot]:
        """Returns the slots it had on the device."""
        old = self.device_slots
        self.cells[WIDTH * self.start + DEVICE : WIDTH * self.end : WIDTH] = slots
        return old

    def leave_device(self) -> list[DeviceSlot]:
        """Returns the slots it had."""
        slots = self.device_slots
        self.on_device = False
        if not self.detached:
            assert self.parent is not None
            self.parent.num_device_children -= 1
        return slots

    def enter_host(self, slots: Sequence[HostSlot]) -> HostCopy:
        self.cells[WIDTH * self.start + HOST : WIDTH * self.end : WIDTH] = slots
        self.host = HostCopy(self)
        return self.host

    def extend(self, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]) -> None:
        """Append blocks to a run that is on the device only and ends its cells."""
        self.cells += _cells(hashes, slots)
        self.end += len(hashes)

    def drop_cells(self) -> None:
        """This run is gone, and its blocks are not needed any more. They leave the list of cells when its later blocks
        have left it; with them go blocks of runs above it that are gone already.
        """
        run, cells = self, self.cells
        while run.cells is cells and run.ends_its_cells and run.is_gone:
            del cells[WIDTH * run.start :]
            if run.parent is None:
                return
            run = run.parent

    # ---- its place in the tree

    @property
    def is_gone(self) -> bool:
        """Neither findable nor in use."""
        return self.detached and not self.on_device and self.host is None

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def add_child(self, child: Run) -> None:
        """Hang `child` below this run, in place of one in the same tier that starts with the same block, if any."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        if child.on_device and child.first_hash not in self.children:
            self.num_device_children += 1
        self.children[child.first_hash] = child
        child.parent = self

    def leave_parent(self) -> None:
        """It can no longer be found from above, if it could; it keeps its way up."""
        parent, block = self.parent, self.first_hash
        if parent is not None and parent.children.get(block) is self:
            del parent.children[block]
            parent.num_device_children -= self.on_device

    def drop_children(self) -> dict[BlockHash, Run]:
        """Returns the children it had; they keep their way up. O(1)."""
        children, self.children = self.children, _NO_CHILDREN
        return children

    def drop_links(self) -> None:
        """The run is not needed any more: it refers to no other run, so that it is no cyclic garbage."""
        self.older = self.younger = self.parent = None
        if self.host is not None:
            self.host.older = self.host.younger = None
            self.host = None

    def path(self) -> list[Run]:
        """Runs from the root's child down to this one, in prompt order; none for the root."""
        runs = []
        run = self
        while run.parent is not None:
            runs.append(run)
            run = run.parent
        runs.reverse()
        return runs

    def subtree(self) -> Iterator[Run]:
        """This run and everything below it, parents before children."""
        stack = [self]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    # ---- cutting and joining

    def cut(self, count: int) -> Run:
        """Its first `count` blocks become a new run, which takes its place; it hangs below. O(1)."""
        assert 0 < count < self.length, "a split leaves blocks on both sides"
        assert self.parent is not None and not self.detached, "what cannot be found is not split"
        head = Run(self.cells, self.start, self.start + count)
        head.on_device, head.pins, head.hits, head.open = self.on_device, self.pins, self.hits, self.open
        head.use_class, head.last_use = self.use_class, self.last_use
        self.parent.add_child(head)
        self.start += count
        head.add_child(self)
        return head

    def fits_parent(self) -> bool:
        """Could it be one run with its parent? Never with the root, which is in no tier.

        Runs that were not cut from each other are joined by moving the lower one's blocks. It may be twice as long as
        the upper one, no longer: so a block is moved O(log n) times, and a chain that cannot be joined doubles with
        every run.
        """
        parent = self.parent
        return (
            parent is not None
            and parent.parent is not None
            and parent.pins == self.pins
            and parent.hits == self.hits
            and parent.use_class == self.use_class
            and (parent.last_use < 0) == (self.last_use < 0)  # of new blocks the class is not known yet
            and parent.open is None
            and self.open is None
            and parent.on_device == self.on_device
            and (parent.host is None) == (self.host is None)
            and not self.detached
            and len(parent.children) == 1
            and (
                parent.cells is self.cells
                or (
                    parent.ends_its_cells
                    and not self.start
                    and self.ends_its_cells
                    and self.length <= 2 * parent.length
                )
            )
        )

    def is_queued_next_to_parent(self) -> bool:
        """Is the parent the next younger one in each tier's queue? They must be in the same tiers."""
        parent = self.parent
        assert parent is not None
        is_next_on_host = self.host is None or parent.host is None or self.host.is_next_to(parent.host)
        return self.is_next_to(parent) and is_next_on_host

    def take_over_parent(self) -> None:
        """It begins with its parent's blocks, in its parent's place. The parent is nowhere now: a reference to it that
        was kept elsewhere leads to this run, by its `parent`.
        """
        parent = self.parent
        assert parent is not None and parent.parent is not None
        if parent.cells is not self.cells:
            moved = self.cells
            parent.cells += moved
            moved[:] = [(parent.cells, parent.end)]
            self.cells, self.end = parent.cells, parent.end + self.length
        self.start = parent.start
        parent.drop_children()
        parent.parent.add_child(self)
        parent.parent, parent.on_device, parent.host = self, False, None


def _cells(hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]) -> Cells:
    cells: Cells = [None] * (WIDTH * len(hashes))
    cells[::WIDTH] = hashes
    cells[DEVICE::WIDTH] = slots
    return cells


class RunQueue:
    """Oldest first: a linked list, so that the half of a split run gets its place. Every method is O(1)."""

    def __init__(self) -> None:
        end = self.end = QueueNode()
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

    def touch(self, link: QueueNode) -> None:
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

    def put_oldest(self, link: QueueNode) -> None:
        """Put `link`, which is in no queue, before all others."""
        link.enter_after(self.end)

    def drain(self, *, youngest_first: bool = False) -> Iterator[QueueNode]:
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
