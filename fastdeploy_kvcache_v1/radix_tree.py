"""RadixTree: every cached block of every tier, found by prefix.

Structure: runs of blocks (see `run.py`) below an empty root. A block is reachable only through all its ancestors, so
prefix closure (DESIGN 4.2) holds by construction; on the device tier it holds because eviction takes leaves first and
because requests pin whole paths. Cost of every operation: O(runs touched + blocks copied), independent of cache size.

The tree is the shape; what is in which tier is `Residency`'s. It decides nothing: which block to evict when, and what
to copy, is the manager's business. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .metadata import BlockHash, CacheEvent, CacheLevel, DeviceSlot
from .residency import Residency
from .run import Run


class RadixTree:
    """The prefix tree over the device and the host tier."""

    def __init__(self, residency: Residency) -> None:
        self.root = Run(())
        self._residency = residency

    # ---- finding and pinning

    def match(self, hashes: Sequence[BlockHash], limit: int) -> Run:
        """Pin the longest cached prefix of `hashes[:limit]`; returns its last run (the root when nothing matched)."""
        run, taken = self._find(hashes, limit)
        leaf = run if taken == len(run.hashes) else self.split(run, taken)
        run = leaf
        while run.parent is not None:
            self._residency.pin(run)
            run = run.parent
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
            self._residency.unpin(run)
            if touch:
                self._residency.touch(run)
            run = run.parent
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
                return self._append(leaf, hashes[done:], slots[done:]), duplicates
            taken = child.common_blocks(hashes, done, min(len(child.hashes), len(hashes) - done))
            leaf = child if taken == len(child.hashes) else self.split(child, taken)
            self._residency.pin(leaf)
            if leaf.device is None:
                self._residency.give_device(leaf, slots[done : done + taken])
            else:
                duplicates.extend(slots[done : done + taken])
            done += taken
        return leaf, duplicates

    # ---- taking blocks away

    def device_victim(self, most: int) -> Run | None:
        """The least recently used evictable device run without device children, split to at most `most` blocks."""
        queue = self._residency.device_queue
        for run in queue:
            if run.pins:
                queue.discard(run)  # its last user puts it back
                continue
            while (child := run.device_child()) is not None:
                run = child
            return self._tail(run, most)
        return None

    def host_victim(self, most: int) -> Run | None:
        """The least recently used run whose host copy can go, split to at most `most` blocks."""
        for run in self._residency.host_queue:
            victim = run
            while victim.is_host_evictable and victim.device is None and victim.children:
                victim = next(iter(victim.children.values()))
            if victim.is_host_evictable:
                return self._tail(victim, most)
            self._residency.park(run)
        return None

    def detach(self, top: Run) -> list[Run]:
        """Make `top` and everything below it unfindable; slots come back as soon as nobody uses them."""
        assert top.parent is not None and not top.detached, "only attached runs can be detached"
        top.parent.remove_child(top)
        detached = list(top.subtree())
        for run in detached:
            self._residency.detach(run)
        return detached

    def detach_all(self) -> None:
        for child in list(self.root.children.values()):
            self.detach(child)

    # ---- cutting and joining runs

    def split(self, run: Run, count: int) -> Run:
        """Cut after `count` blocks. `run` keeps its identity as the lower part; returns the new upper part."""
        assert 0 < count < len(run.hashes), "a split leaves blocks on both sides"
        assert run.parent is not None and not run.detached, "what cannot be found is not split"
        head = Run(run.hashes[:count])
        head.pins, head.hits, head.open = run.pins, run.hits, run.open
        run.parent.add_child(head)
        run.hashes = run.hashes[count:]
        head.add_child(run)
        self._residency.split(head, run)
        return head

    def _append(self, leaf: Run, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]) -> Run:
        """New blocks below `leaf`: in place if they share its fate, else as a child."""
        if leaf.pins == 1 and not leaf.hits and leaf.host is None and not leaf.children:
            self._residency.extend_device(leaf, hashes, slots)
            return leaf
        run = Run(tuple(hashes))
        leaf.add_child(run)
        self._residency.pin(run)
        self._residency.give_device(run, slots)
        return run

    def _tail(self, run: Run, most: int) -> Run:
        if len(run.hashes) > most:
            self.split(run, len(run.hashes) - most)
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
        self._residency.join(run, parent)
        parent.parent.add_child(run)

    def _find(self, hashes: Sequence[BlockHash], limit: int) -> tuple[Run, int]:
        run, position = self.root, 0
        while position < limit:
            child = run.children.get(hashes[position])
            if child is None or (child.device is None and child.open is not None):
                break  # not cached, or on its way to the host since this very step
            taken = child.common_blocks(hashes, position, min(len(child.hashes), limit - position))
            if taken < len(child.hashes):
                return child, taken
            run, position = child, position + taken
        return run, len(run.hashes)

    # ---- looking

    def runs(self) -> Iterator[Run]:
        """Every findable run, parents before children; O(cache)."""
        subtree = self.root.subtree()
        next(subtree)
        return subtree

    def snapshot_events(self) -> list[CacheEvent]:
        """`cleared`, then one `stored` event for every run of every tier; O(cache)."""
        events = [CacheEvent("cleared", None)]
        for run in self.runs():
            for level, slots in ((CacheLevel.DEVICE, run.device), (CacheLevel.HOST, run.host_slots)):
                if slots is not None and run.open is not level:
                    events.append(CacheEvent("stored", level, run.hashes, run.parent_hash))
        return events
