"""RadixTree: every cached block of every tier, found by prefix.

Structure: runs of blocks (see `run.py`) below an empty root. A block is reachable only through all its ancestors, so
prefix closure (DESIGN 4.2) holds by construction; on the device tier it holds because eviction takes leaves first and
because requests pin whole paths. Cost of every operation: O(runs touched + blocks copied), independent of cache size.

The tree owns the slots of cached blocks and gives them back to their pools. It decides nothing: which block to evict
when, and what to copy, is the manager's business. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .block_pool import DeviceBlockPool, HostBlockPool
from .event_log import EventLog
from .metadata import BlockHash, CacheEvent, CacheLevel, DeviceSlot, HostSlot
from .run import Run, RunQueue, check_queue, check_runs, expect


class RadixTree:
    """The prefix tree over the device and the host tier."""

    def __init__(self, device_pool: DeviceBlockPool, host_pool: HostBlockPool, events: EventLog) -> None:
        self.root = Run([])
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._events = events
        self._device_queue = RunQueue(CacheLevel.DEVICE)
        self._host_queue = RunQueue(CacheLevel.HOST)
        self._open: dict[Run, None] = {}
        self._detached: dict[Run, None] = {}
        self._blocked: dict[Run, None] = {}
        """Out of the host queue until the step is taken: a copy that it starts fills them or a run below them."""
        self.num_device_evictable = 0
        """Blocks that device eviction can free at once; exact."""
        self.num_host_evictable = 0

    # ---- finding and pinning

    def match(self, hashes: Sequence[BlockHash], limit: int) -> Run:
        """Pin the longest cached prefix of `hashes[:limit]`; returns its last run (the root when nothing matched)."""
        run, taken = self._find(hashes, limit)
        leaf = run if taken == len(run) else self.split(run, taken)
        self._pin(leaf)
        return leaf

    def path(self, leaf: Run) -> list[Run]:
        """Runs from the root's child down to `leaf`, in prompt order."""
        runs = []
        run = leaf
        while run.parent is not None:
            runs.append(run)
            run = run.parent
        runs.reverse()
        return runs

    def release(self, leaf: Run, *, touch: bool) -> None:
        """Drop one pin of the path to `leaf`. `touch` makes it the most recently used, leaf first and root last."""
        run = leaf
        while run.parent is not None:
            parent = run.parent
            run.pins -= 1
            if not run.pins:
                self._unpinned(run)
            if touch and not run.detached:
                self._touch(run)
            run = parent
        self._undo_splits(leaf)

    def hit(self, leaf: Run, count: int = 1) -> None:
        """Add `count` hits to the path of `leaf` (negative to take them back)."""
        run = leaf
        while run.parent is not None:
            run.hits += count
            run = run.parent

    # ---- adding blocks

    def insert(
        self, leaf: Run, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]
    ) -> tuple[Run, list[DeviceSlot]]:
        """Cache computed blocks below the pinned `leaf` for the request that pins it.

        Returns the request's new leaf, pinned, and those of `slots` that were not taken because the block is on the
        device already: they stay the caller's.
        """
        if leaf.fits_parent():  # where a pinned run is queued does not matter: its release will touch it
            self._absorb_parent(leaf)
        duplicates: list[DeviceSlot] = []
        done = 0
        while done < len(hashes):
            child = leaf.children.get(hashes[done])
            if child is None:
                return self._append(leaf, list(hashes[done:]), list(slots[done:])), duplicates
            taken = child.common_blocks(hashes, done, min(len(child), len(hashes) - done))
            leaf = child if taken == len(child) else self.split(child, taken)
            if leaf.device is None:
                self._give_device(leaf, list(slots[done : done + taken]))
                self._events.stored(CacheLevel.DEVICE, leaf.hashes, self._parent_hash(leaf))
            else:
                duplicates.extend(slots[done : done + taken])
            self._pin_one(leaf)
            done += taken
        return leaf, duplicates

    def start_swap_in(self, run: Run, slots: list[DeviceSlot]) -> None:
        """Open the copy of a pinned host run into device `slots`."""
        run.open = CacheLevel.DEVICE
        self._open[run] = None
        self._give_device(run, slots)

    def start_swap_out(self, run: Run, slots: list[HostSlot]) -> None:
        """Open the copy of a device run into host `slots`. The device side may go at once: evictions run first."""
        run.open = CacheLevel.HOST
        self._open[run] = None
        run.host = slots
        self._host_queue.append(run)

    def open_swap_ins(self) -> list[Run]:
        return [run for run in self._open if run.open is CacheLevel.DEVICE]

    def open_swap_outs(self) -> list[Run]:
        return [run for run in self._open if run.open is CacheLevel.HOST]

    def close_transfers(self) -> None:
        """The worker is being told of every open copy: from here on, order guarantees what the tree says."""
        for run in self._open:
            level, run.open = run.open, None
            if run.detached:
                self._free_if_unused(run)
            elif level is CacheLevel.DEVICE:
                self._events.stored(CacheLevel.DEVICE, run.hashes, self._parent_hash(run))
            else:
                self._events.stored(CacheLevel.HOST, run.hashes, self._parent_hash(run))
                if run.is_host_evictable:
                    self.num_host_evictable += len(run)
        self._open.clear()
        for run in self._blocked:
            if run.host is not None and not run.detached and run.host_link is None:
                self._host_queue.touch(run)
        self._blocked.clear()

    # ---- taking blocks away

    def device_victim(self, most: int) -> Run | None:
        """The least recently used evictable device run without device children, split to at most `most` blocks."""
        for run in self._device_queue:
            if run.pins:
                self._device_queue.discard(run)  # its last user puts it back
                continue
            while (child := run.device_child()) is not None:
                run = child
            return self._tail(run, most)
        return None

    def host_victim(self, most: int) -> Run | None:
        """The least recently used run whose host copy can go, split to at most `most` blocks."""
        if not self.num_host_evictable:
            return None
        for run in self._host_queue:
            victim = run
            while victim.is_host_evictable and victim.device is None and victim.children:
                victim = next(iter(victim.children.values()))
            if victim.is_host_evictable:
                return self._tail(victim, most)
            self._host_queue.discard(run)
            if not run.pins:
                self._blocked[run] = None  # else its last user puts it back
        return None

    def drop_device(self, run: Run) -> None:
        """Give up the device copy of an unpinned run that keeps its host copy."""
        assert run.host is not None and not run.pins, "only unpinned runs with a host copy may leave the device"
        self.num_device_evictable -= len(run)
        self._take_device(run)

    def drop_host(self, run: Run) -> None:
        """Give up the host copy of a run that stays on the device."""
        assert run.device is not None and run.open is None, "only runs that stay on the device may lose their host copy"
        if run.is_host_evictable:
            self.num_host_evictable -= len(run)
        self._host_queue.discard(run)
        slots, run.host = run.host, None
        assert slots is not None
        self._host_pool.free(slots)
        self._events.removed(CacheLevel.HOST, run.hashes)

    def detach(self, top: Run) -> list[Run]:
        """Make `top` and everything below it unfindable; slots come back as soon as nobody uses them."""
        assert top.parent is not None and not top.detached, "only attached runs can be detached"
        top.parent.remove_child(top)
        detached = list(top.subtree())
        for run in detached:
            self._forget(run)
        return detached

    def detach_all(self) -> None:
        for child in list(self.root.children.values()):
            self.detach(child)
        self._events.cleared()

    def abandon_transfers(self) -> None:
        """Forget open copies that will never be handed to a worker (everything has been detached and released)."""
        for run in self._open:
            run.open = None
            self._free_if_unused(run)
        self._open.clear()
        self._blocked.clear()

    def split(self, run: Run, count: int) -> Run:
        """Cut after `count` blocks. `run` keeps its identity as the lower part; returns the new upper part."""
        assert 0 < count < len(run), "a split leaves blocks on both sides"
        head = Run(run.hashes[:count], run.device and run.device[:count], run.host and run.host[:count], run.parent)
        run.hashes = run.hashes[count:]
        run.device = run.device and run.device[count:]
        run.host = run.host and run.host[count:]
        head.pins, head.hits, head.open, head.detached = run.pins, run.hits, run.open, run.detached
        head.add_child(run)
        assert run.parent is not None
        if run.detached:
            self._detached[head] = None
        else:
            run.parent.add_child(head)
            if run.device_link is not None:
                self._device_queue.insert_after(head, run)
            if run.host_link is not None:
                self._host_queue.insert_after(head, run)
            if run in self._blocked:
                self._blocked[head] = None
        if run.open is not None:
            self._open[head] = None
        run.parent = head
        return head

    # ---- looking

    def runs(self) -> Iterator[Run]:
        """Every findable run, parents before children; O(cache)."""
        subtree = self.root.subtree()
        next(subtree)
        return subtree

    def detached_runs(self) -> Iterator[Run]:
        return iter(self._detached)

    def snapshot_events(self) -> list[CacheEvent]:
        """`cleared`, then one `stored` event for every run of every tier; O(cache)."""
        events = [CacheEvent("cleared", None)]
        for run in self.runs():
            for level, slots in ((CacheLevel.DEVICE, run.device), (CacheLevel.HOST, run.host)):
                if slots is not None and run.open is not level:
                    events.append(CacheEvent("stored", level, tuple(run.hashes), self._parent_hash(run)))
        return events

    def check(self) -> None:
        """Raises `InvariantError` naming the first broken invariant; O(cache)."""
        runs = list(self.runs())
        check_runs(runs, self._detached.keys(), self._open.keys())
        check_queue(self._device_queue, {run for run in runs if run.device is not None}, frozenset(), "device")
        check_queue(self._host_queue, {run for run in runs if run.host is not None}, self._blocked.keys(), "host")
        device = sum(len(run) for run in runs if run.is_device_evictable)
        host = sum(len(run) for run in runs if run.is_host_evictable)
        expect(
            device == self.num_device_evictable, f"{device} device blocks evictable, not {self.num_device_evictable}"
        )
        expect(host == self.num_host_evictable, f"{host} host blocks evictable, not {self.num_host_evictable}")

    # ---- inside

    def _find(self, hashes: Sequence[BlockHash], limit: int) -> tuple[Run, int]:
        run, position = self.root, 0
        while position < limit:
            child = run.children.get(hashes[position])
            if child is None or (child.device is None and child.open is not None):
                break  # not cached, or on its way to the host since this very step
            taken = child.common_blocks(hashes, position, min(len(child), limit - position))
            if taken < len(child):
                return child, taken
            run, position = child, position + taken
        return run, len(run)

    def _pin(self, leaf: Run) -> None:
        run = leaf
        while run.parent is not None:
            self._pin_one(run)
            run = run.parent

    def _pin_one(self, run: Run) -> None:
        if not run.pins:
            if run.is_device_evictable:
                self.num_device_evictable -= len(run)
            if run.is_host_evictable:
                self.num_host_evictable -= len(run)
        run.pins += 1

    def _unpinned(self, run: Run) -> None:
        if run.open is CacheLevel.DEVICE:  # nobody waits for it any more, and the worker does not know of it yet
            self._take_device(run)
            run.open = None
            del self._open[run]
        if run.detached:
            self._free_if_unused(run)
            return
        if run.is_device_evictable:
            self.num_device_evictable += len(run)
            if run.device_link is None:
                self._device_queue.append(run)
        if run.host is not None:
            if run.open is None:
                self.num_host_evictable += len(run)
            if run.host_link is None:
                self._host_queue.append(run)

    def _touch(self, run: Run) -> None:
        if run.device is not None:
            self._device_queue.touch(run)
        if run.host is not None:
            self._host_queue.touch(run)

    def _append(self, leaf: Run, hashes: list[BlockHash], slots: list[DeviceSlot]) -> Run:
        """New blocks below `leaf`: in place if they share its fate, else as a child."""
        self._events.stored(CacheLevel.DEVICE, hashes, leaf.hashes[-1] if leaf.hashes else None)
        fresh = leaf.pins == 1 and not leaf.hits and leaf.host is None and leaf.open is None
        if fresh and not leaf.children and leaf.device is not None:
            leaf.hashes.extend(hashes)
            leaf.device.extend(slots)
            return leaf
        run = Run(hashes, slots, None, leaf)
        run.pins = 1
        leaf.add_child(run)
        self._device_queue.append(run)
        return run

    def _give_device(self, run: Run, slots: list[DeviceSlot]) -> None:
        assert len(slots) == len(run), "one slot per block"
        run.device = slots
        self._device_queue.append(run)
        if run.is_device_evictable:
            self.num_device_evictable += len(run)

    def _take_device(self, run: Run) -> None:
        slots, run.device = run.device, None
        assert slots is not None
        if not run.detached:
            self._device_queue.discard(run)
            if run.open is not CacheLevel.DEVICE:
                self._events.removed(CacheLevel.DEVICE, run.hashes)
        self._device_pool.free(slots)

    def _forget(self, run: Run) -> None:
        if run.is_device_evictable:
            self.num_device_evictable -= len(run)
        if run.is_host_evictable:
            self.num_host_evictable -= len(run)
        if run.device is not None:
            self._device_queue.discard(run)
            if run.open is not CacheLevel.DEVICE:
                self._events.removed(CacheLevel.DEVICE, run.hashes)
        if run.host is not None:
            self._host_queue.discard(run)
            if run.open is not CacheLevel.HOST:
                self._events.removed(CacheLevel.HOST, run.hashes)
        run.detached = True
        self._detached[run] = None
        self._free_if_unused(run)

    def _free_if_unused(self, run: Run) -> None:
        """Slots of a detached run go back once no request uses them; host slots also wait for an open copy."""
        if run.pins:
            return
        if run.device is not None:
            slots, run.device = run.device, None
            self._device_pool.free(slots)
        if run.open is None:
            if run.host is not None:
                host, run.host = run.host, None
                self._host_pool.free(host)
            self._detached.pop(run, None)

    def _tail(self, run: Run, most: int) -> Run:
        if len(run) > most:
            self.split(run, len(run) - most)
        return run

    def _undo_splits(self, leaf: Run) -> None:
        """Merge the runs of a released path whose sides share one fate again, next to each other in the LRU order."""
        run = next(iter(leaf.children.values())) if len(leaf.children) == 1 else leaf
        while run.parent is not None:
            if run.fits_parent() and run.is_queued_next_to_parent():
                self._absorb_parent(run)
            else:
                run = run.parent

    def _absorb_parent(self, run: Run) -> None:
        """`run` takes over the blocks of its parent, which nobody can hold as leaf when the two share one fate."""
        parent = run.parent
        assert parent is not None and parent.parent is not None
        run.hashes = parent.hashes + run.hashes
        if parent.device is not None and run.device is not None:
            run.device = parent.device + run.device
            self._device_queue.discard(parent)
        if parent.host is not None and run.host is not None:
            run.host = parent.host + run.host
            self._host_queue.discard(parent)
            self._blocked.pop(parent, None)
        run.parent = parent.parent
        run.parent.add_child(run)

    @staticmethod
    def _parent_hash(run: Run) -> BlockHash | None:
        assert run.parent is not None
        return run.parent.hashes[-1] if run.parent.hashes else None
