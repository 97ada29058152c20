"""Run: consecutive cached blocks that are in the same tiers, pinned by the same requests and hit equally often.

The prefix tree consists of runs, so pinning, ordering and evicting cost O(runs). A run is split before its blocks
would begin to differ. Hashes are chained: two runs agree up to a block if and only if its hashes agree.

The blocks of runs lie in *cells*, a list with three entries per block: hash, device slot, host slot. A run is the range
`[start, end)` of blocks of such a list. Both parts of a run that was cut share its list, and the lower part is a child
of the upper one. Every block of a list belongs to one run. So cutting a run and joining its parts are O(1), and
appending blocks to the end of the list is O(blocks appended).

A run also has a place in the eviction order of each of its tiers: a link of a `RunQueue`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from ..contract.messages import BlockHash, CacheLevel, DeviceSlot, HostSlot

Cells = list[Any]
"""`[hash, device slot, host slot]` of block 0, then of block 1, and so on. The slot is meaningless in a tier that does
not hold the run. Cells whose blocks were moved have one entry: the new cells, and the place of block 0 there."""

WIDTH = 3
DEVICE = 1
HOST = 2

_NO_CHILDREN: dict[BlockHash, Run] = {}
"""Shared by all leaves, which are most runs. Never written: `Run.add_child` replaces it."""


class QueueNode:
    """A place in the eviction order of a tier. Without neighbours it is in no queue."""

    __slots__ = ("older", "younger")

    run: Run

    def __init__(self) -> None:
        self.older: QueueNode | None = None
        self.younger: QueueNode | None = None

    @property
    def is_queued(self) -> bool:
        return self.younger is not None

    def is_next_to(self, other: QueueNode) -> bool:
        """True if `other` is the next younger place, or if both are in no queue."""
        return self.younger is (other if other.is_queued else None)

    def enter_after(self, other: QueueNode) -> None:
        """Put this place, which is in no queue, just behind `other`: one place younger."""
        younger = other.younger
        assert younger is not None and not self.is_queued
        self.older, self.younger = other, younger
        other.younger = younger.older = self

    def leave_queue(self) -> None:
        older, younger = self.older, self.younger
        if younger is not None:
            assert older is not None
            older.younger, younger.older = younger, older
            self.older = self.younger = None


class Owner:
    """A session, for the runs that no other session has used."""

    __slots__ = ("due", "leaf", "use_class")

    def __init__(self) -> None:
        self.leaf: Run | None = None
        """Last run of its newest prompt, while that is cached and its own."""
        self.use_class = 0
        """Class of its blocks in `ReuseHistory`."""
        self.due: int | None = None
        """Time at which it comes back, or None: not told, not believed, overdue, or never."""


class HostCopy(QueueNode):
    """Exists while a run has host slots: its place in the eviction order of the host."""

    __slots__ = ("is_duplicate", "run")

    def __init__(self, run: Run) -> None:
        self.older = self.younger = None
        self.run = run
        self.is_duplicate = False
        """True while it is in the queue of `HostDuplicates`."""


class Run(QueueNode):
    """The run is its own place in the device's order, to save memory: most runs are on the device only."""

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
        "owner",
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
        """By the hash of their first block. Read-only, see `add_child`."""
        self.num_device_children = 0
        """Number of children on the device. Meaningless for the root and for detached runs."""
        self.pins = 0
        """Number of requests that use this run or one below it."""
        self.hits = 0
        """Requests that hit it, counted up to `BackupPolicy.copied_after_hits`."""
        self.use_class = 0
        """Class of `ReuseHistory`: how often requests found these blocks computed."""
        self.last_use = -1
        """End of the last request that used it, in the time of `ReuseHistory`; -1 before the first one ends."""
        self.owner: Owner | None = None
        """The session that alone has used it; None: several have."""
        self.open: CacheLevel | None = None
        """Tier that an open copy fills: one that the worker does not know of yet."""
        self.detached = False
        """True once it can no longer be found and only waits for its last user."""

    @classmethod
    def of(cls, hashes: Sequence[BlockHash], slots: Sequence[Any], level: CacheLevel = CacheLevel.DEVICE) -> Run:
        """Make a run with cells of its own, for blocks in `slots` of tier `level`."""
        run = cls(_cells(hashes, slots), 0, len(hashes))
        run.on_device = level is CacheLevel.DEVICE
        if not run.on_device:
            run.enter_host(slots)
        return run

    # ---- blocks

    @property
    def run(self) -> Run:  # type: ignore[override]
        return self

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def hashes(self) -> list[BlockHash]:
        return self.cells[WIDTH * self.start : WIDTH * self.end : WIDTH]

    def slots(self, tier: int, begin: int, end: int) -> list[Any]:
        """Copy the slots of blocks `[begin, end)` of its cells in `tier` (`DEVICE` or `HOST`). O(end - begin).

        An open swap-out reads these device slots even after the run has left the device: copies run before the slots
        are reused.
        """
        return self.cells[WIDTH * begin + tier : WIDTH * end : WIDTH]

    @property
    def device_slots(self) -> list[DeviceSlot]:
        """Copy its device slots; empty if it is not on the device. O(length)."""
        return self.cells[WIDTH * self.start + DEVICE : WIDTH * self.end : WIDTH] if self.on_device else []

    @property
    def host_slots(self) -> list[HostSlot]:
        """Copy its host slots; empty if it is not on the host. O(length)."""
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
        """Hash of the block before its first one, None at the start of a prompt."""
        parent = self.parent
        return None if parent is None or parent.is_root else parent.last_hash

    @property
    def ends_its_cells(self) -> bool:
        """True if blocks can be appended to it, or its blocks be taken off the list."""
        return WIDTH * self.end == len(self.cells)

    def common_blocks(self, hashes: Sequence[BlockHash], start: int, count: int) -> int:
        """Count how many of its first `count` blocks equal `hashes[start:]`; the first one must. O(log count)."""
        cells, mine = self.cells, self.start
        if cells[WIDTH * (mine + count - 1)] == hashes[start + count - 1]:
            return count

        def differs(at: int) -> bool:
            return bool(cells[WIDTH * (mine + at)] != hashes[start + at])

        return 1 + bisect_left(range(1, count - 1), True, key=differs)

    # ---- slots; the caller keeps pools, counts and queues

    def enter_device(self, slots: Sequence[DeviceSlot]) -> None:
        assert self.pins and not self.on_device and len(slots) == self.length, "a run in use gets one slot per block"
        self.change_device_slots(slots)
        self.on_device = True
        assert self.parent is not None
        self.parent.num_device_children += 1

    def change_device_slots(self, slots: Sequence[DeviceSlot]) -> list[DeviceSlot]:
        """Replace its device slots. Returns the old ones, none if it was not on the device."""
        old = self.device_slots
        self.cells[WIDTH * self.start + DEVICE : WIDTH * self.end : WIDTH] = slots
        return old

    def leave_device(self) -> list[DeviceSlot]:
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

    def drop_last(self, count: int) -> list[DeviceSlot]:
        """Remove its last `count` blocks, which end its cells. Returns their device slots. O(count)."""
        assert 0 < count < self.length and self.ends_its_cells, "a run keeps its first blocks"
        self.end -= count
        slots = self.cells[WIDTH * self.end + DEVICE :: WIDTH]
        del self.cells[WIDTH * self.end :]
        return slots

    def drop_cells(self) -> None:
        """Remove the blocks of gone runs, from this one upwards, as far as they are the last ones of their cells."""
        run, cells = self, self.cells
        while run.cells is cells and run.ends_its_cells and run.is_gone:
            del cells[WIDTH * run.start :]
            if run.parent is None:
                return
            run = run.parent

    # ---- the tree

    @property
    def is_gone(self) -> bool:
        return self.detached and not self.on_device and self.host is None

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def add_child(self, child: Run) -> None:
        """Add `child`. It replaces a child in the same tier that starts with the same block, if there is one."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        if child.on_device and child.first_hash not in self.children:
            self.num_device_children += 1
        self.children[child.first_hash] = child
        child.parent = self

    def leave_parent(self) -> None:
        """Remove this run from its parent's children. It keeps its link to the parent."""
        parent, block = self.parent, self.first_hash
        if parent is not None and parent.children.get(block) is self:
            del parent.children[block]
            parent.num_device_children -= self.on_device

    def drop_children(self) -> dict[BlockHash, Run]:
        """Remove and return all children, which keep their link to this run. O(1)."""
        children, self.children = self.children, _NO_CHILDREN
        return children

    def drop_links(self) -> None:
        """Drop all references to other runs and to sessions, so that a forgotten run is not cyclic garbage."""
        self.older = self.younger = self.parent = self.owner = None
        if self.host is not None:
            self.host.older = self.host.younger = None
            self.host = None

    def disown(self) -> None:
        """Record that several sessions have used it."""
        if self.owner is not None and self.owner.leaf is self:
            self.owner.leaf = None
        self.owner = None

    def path(self) -> list[Run]:
        """List the runs from the root's child down to this one, in prompt order; empty for the root."""
        runs = []
        run = self
        while run.parent is not None:
            runs.append(run)
            run = run.parent
        runs.reverse()
        return runs

    def subtree(self) -> Iterator[Run]:
        """Yield this run and all runs below it, parents before children."""
        stack = [self]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    # ---- cutting and joining

    def cut(self, count: int) -> Run:
        """Move its first `count` blocks to a new run, which becomes its parent. O(1)."""
        assert 0 < count < self.length, "a split leaves blocks on both sides"
        assert self.parent is not None and not self.detached, "only a findable run is split"
        head = Run(self.cells, self.start, self.start + count)
        head.on_device, head.pins, head.hits, head.open = self.on_device, self.pins, self.hits, self.open
        head.use_class, head.last_use, head.owner = self.use_class, self.last_use, self.owner
        self.parent.add_child(head)
        self.start += count
        head.add_child(self)
        return head

    def fits_parent(self) -> bool:
        """True if it could be one run with its parent; never with the root, which is in no tier.

        Joining runs of different cells moves the lower run's blocks. The lower run may be at most twice as long as the
        upper one. So a block is moved O(log n) times, and lengths double along a chain that cannot be joined.
        """
        parent = self.parent
        return (
            parent is not None
            and parent.parent is not None
            and parent.pins == self.pins
            and parent.hits == self.hits
            and parent.use_class == self.use_class
            and parent.owner is self.owner
            and (parent.last_use < 0) == (self.last_use < 0)  # the class of new blocks is unknown
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
        """True if the parent is the next younger run in each tier's queue. Both must be in the same tiers."""
        parent = self.parent
        assert parent is not None
        is_next_on_host = self.host is None or parent.host is None or self.host.is_next_to(parent.host)
        return self.is_next_to(parent) and is_next_on_host

    def take_over_parent(self) -> None:
        """Prepend the parent's blocks and take its place. The old parent's `parent` is this run from now on."""
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
    """A linked list of places, oldest first: each part of a split run gets a place. Every method is O(1)."""

    def __init__(self) -> None:
        end = self.end = QueueNode()
        """Sentinel between the youngest and the oldest place, never moved: `end.younger` is the oldest, or `end`."""
        end.older = end.younger = end

    def __iter__(self) -> Iterator[Run]:
        """Yield runs, oldest first. The caller may remove or move the run just yielded."""
        link = self.end.younger
        while link is not self.end:
            assert link is not None
            following = link.younger
            yield link.run
            link = following

    def oldest(self) -> Run | None:
        link, end = self.end.younger, self.end
        assert link is not None
        return None if link is end else link.run

    def youngest(self) -> Run | None:
        link, end = self.end.older, self.end
        assert link is not None
        return None if link is end else link.run

    def touch(self, link: QueueNode) -> None:
        """Move `link` to the young end of this queue, from any queue or none."""
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
        """Put `link`, which is in no queue, at the old end."""
        link.enter_after(self.end)

    def drain(self, *, youngest_first: bool = False) -> Iterator[QueueNode]:
        """Remove all places, yielding each."""
        end = self.end
        while (link := end.older if youngest_first else end.younger) is not end:
            assert link is not None
            link.leave_queue()
            yield link

    def forget(self) -> None:
        """Empty the queue. Its former places still look queued: the caller must care for them."""
        end = self.end
        end.older = end.younger = end

    def check_links(self) -> bool:
        """True if every link and its neighbours agree in both directions."""
        link = self.end
        while True:
            younger = link.younger
            if younger is None or younger.older is not link:
                return False
            link = younger
            if link is self.end:
                return True
