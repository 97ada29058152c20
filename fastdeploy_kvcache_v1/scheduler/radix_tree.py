"""RadixTree: finds cached blocks of both tiers by prefix.

The tree has runs of blocks (see `run.py`) below an empty root. A block is reachable only through all its ancestors. If
a block is on the device, so are its ancestors: eviction takes leaves first, and requests pin whole paths. Every
operation costs O(runs touched + blocks named), independent of the size of the cache and of the length of runs.

The tree is the shape alone: `Residency` knows the tiers, and the policies decide about evictions and copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..contract.messages import BlockHash, CacheLevel, DeviceSlot, HostSlot
from .residency import Residency
from .reuse.history import Stretch
from .reuse.sessions import Session
from .run import Run
from .traffic.evicted_pieces import RESET

NONE_ABOVE: Stretch = (0, 0)


class RadixTree:
    def __init__(self, residency: Residency) -> None:
        self.root = Run([], 0, 0)
        self._residency = residency
        self._ruins: list[dict[BlockHash, Run]] = []
        """Children of forgotten runs, which `sweep` frees."""

    # ---- finding and pinning

    def match(self, hashes: Sequence[BlockHash], limit: int) -> list[Run]:
        """Pin the longest cached prefix of `hashes[:limit]`. Returns its runs in prompt order."""
        run, taken = self._find(hashes, limit)
        path = (run if taken == run.length else self.split(run, taken)).path()
        for run in path:
            self._residency.pin(run)
        return path

    def look(self, hashes: Sequence[BlockHash], limit: int | None = None) -> list[tuple[Run, int]]:
        """Find the longest cached prefix of `hashes[:limit]` without pinning it. Returns its runs in prompt order, each
        with the number of its blocks that belong to the prefix. Runs on the device come first.
        """
        leaf, taken = self._find(hashes, len(hashes) if limit is None else limit)
        return [(run, taken if run is leaf else run.length) for run in leaf.path()]

    def release(self, leaf: Run, *, touch: bool) -> None:
        """Drop one pin of the path to `leaf`, leaf first. `touch`: the path counts as used."""
        run = leaf
        while run.parent is not None:
            self._residency.unpin(run, touch=touch)
            run = run.parent
        self._undo_splits(leaf)

    def mark(self, leaf: Run, end: int, session: Session, stretches: Sequence[Stretch], now: int) -> None:
        """Record that a request of `session` last used the path to the pinned `leaf` (`end` blocks) at `now`.
        `stretches` gives the use class of its shared blocks, deepest first.
        """
        run, index, shared, stretches = leaf, 0, 1, (*stretches, NONE_ABOVE)
        while (parent := run.parent) is not None:
            below, end = end, end - run.end + run.start
            if run.last_use < 0 or run.owner is session:
                run.owner, run.use_class = session, session.use_class
            else:
                run.disown()
                while stretches[index][0] > below:
                    index += 1
                if stretches[index][0] > end:
                    shared = stretches[index][1]
                run.use_class = shared
            run.last_use = now
            run = parent
        session.leaf = leaf if leaf.owner is session else None

    def leave(self, session: Session) -> None:
        """Queue the runs anew that only an ended session uses, because its class has changed."""
        run = session.leaf
        while run is not None and run.owner is session and not run.pins:
            run.use_class = session.use_class
            self._residency.requeue(run)
            run = run.parent

    # ---- adding blocks

    def insert(
        self, leaf: Run, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]
    ) -> tuple[list[Run], list[int]]:
        """Cache computed blocks below the pinned `leaf` for the request that pins it.

        Returns the pinned runs that hold these blocks, the last of them the request's new leaf, and the indices of
        duplicates among `slots`, which stay the caller's. A block is a duplicate if its cached copy on the device has
        another user or an open copy. Otherwise the new slot replaces the cached one. Without that, a request that does
        not read, alone in a pool of less than twice its length, would never end.
        """
        if leaf.fits_parent():  # the order of a pinned run does not matter: its release touches it
            self._residency.join(leaf)
        runs: list[Run] = []
        duplicates: list[int] = []
        done = 0
        while done < len(hashes):
            child = leaf.children.get(hashes[done])
            if child is None:
                rest = (hashes[done:], slots[done:]) if done else (hashes, slots)  # usually all: avoids copies
                runs.append(self._append(leaf, *rest))
                return runs, duplicates
            taken = child.common_blocks(hashes, done, min(child.length, len(hashes) - done))
            leaf = child if taken == child.length else self.split(child, taken)
            self._residency.pin(leaf)
            if not leaf.on_device or (leaf.pins == 1 and leaf.open is None):
                self._residency.give_device(leaf, slots[done : done + taken])
            else:
                duplicates.extend(range(done, done + taken))
            runs.append(leaf)
            done += taken
        return runs, duplicates

    def graft(self, hashes: Sequence[BlockHash], end: int, slots: Sequence[Any], level: CacheLevel) -> int:
        """Cache loaded blocks, used by no request: the last `len(slots)` of `hashes[:end]`, in `slots` of tier `level`.

        Returns how many of the last slots were taken; the blocks of the others are cached already. The result is 0 if
        the blocks before them are not cached, or not on the device for the device tier. O(slots + runs of the path).
        """
        run, taken = self._find(hashes, end)
        known = sum(above.length for above in run.path()) - run.length + taken
        num_new = end - known
        has_prefix = num_new <= len(slots) and (level is CacheLevel.HOST or run.is_root or run.on_device)
        if not num_new or not has_prefix:
            return 0
        if taken < run.length:
            run = self.split(run, taken)
        if run.children.get(hashes[known]) is not None:
            return 0  # cached: an open copy brings it to the host, so it cannot be found yet
        added = Run.of(hashes[known:end], slots[-num_new:], level)
        run.add_child(added)
        self._residency.add(added)
        if added.fits_parent():
            self._residency.join(added)  # the parent could not have left before these blocks anyway
        return num_new

    # ---- taking blocks away

    def detach(self, top: Run, cause: int | None = None) -> list[Run]:
        """Make `top` and all runs below it unfindable. Slots are freed as soon as no request uses them. `cause`: see
        `Residency.detach`.
        """
        assert top.parent is not None and not top.detached, "only attached runs can be detached"
        top.leave_parent()
        self._residency.unblock(top.parent)
        detached = list(top.subtree()) if top.children else [top]
        for run in reversed(detached):
            self._residency.detach(run, cause)
        return detached

    def detach_all(
        self, in_use: Sequence[Run], other_device: Sequence[DeviceSlot], other_host: Sequence[HostSlot]
    ) -> None:
        """Make all runs unfindable, see `Residency.detach_all`. `sweep` frees the unused ones."""
        self._ruins.append(self.root.drop_children())
        kept = self._residency.detach_all(in_use, other_device, other_host)
        for run in kept:
            self._ruins.append(run.drop_children())
        for run in kept:
            if run.parent is not None and run.parent.detached:
                run.parent.add_child(run)

    def sweep(self, most: int) -> None:
        """Unlink at most `most` forgotten runs, which refer to each other."""
        while self._ruins and most > 0:
            family = self._ruins[-1]
            if not family:
                self._ruins.pop()
                continue
            _, run = family.popitem()
            most -= 1
            if not run.detached:  # `detach_all` has handled runs in use
                self._residency.pieces.add(run, run.start, RESET)
                self._ruins.append(run.drop_children())
                run.drop_links()

    @property
    def has_ruins(self) -> bool:
        return bool(self._ruins)

    def num_fallen(self, hashes: Sequence[BlockHash], at: int, limit: int) -> int:
        """Count the blocks of `hashes[at:limit]` that `detach_all` forgot and `sweep` has not met yet. O(runs)."""
        begin, families = at, self._ruins
        while at < limit and (family := next((each for each in families if hashes[at] in each), None)) is not None:
            run = family[hashes[at]]
            if run.detached:  # it was in use, and `detach_all` has handled it
                break
            at += run.common_blocks(hashes, at, min(run.length, limit - at))
            families = [run.children]
        return at - begin

    # ---- cutting and joining runs

    def split(self, run: Run, count: int) -> Run:
        """Cut after `count` blocks: `run` becomes the lower part. Returns the new upper part."""
        head = run.cut(count)
        self._residency.split(head, run)
        return head

    def tail(self, run: Run, most: int) -> Run:
        """Cut `run` to its last `most` blocks, if it has more, and return it."""
        if run.length > most:
            self.split(run, run.length - most)
        return run

    def _append(self, leaf: Run, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]) -> Run:
        """Add new blocks below `leaf`: to the run itself if they share its state, else as a child."""
        is_as_new = leaf.last_use < 0  # a run that earlier requests used has another class than new blocks
        shares_fate = leaf.pins == 1 and not leaf.hits and leaf.host is None and is_as_new
        if shares_fate and not leaf.children and leaf.ends_its_cells:
            self._residency.extend_device(leaf, hashes, slots)
            return leaf
        run = Run.of(hashes, slots)
        leaf.add_child(run)
        self._residency.add(run, pins=1)
        return run

    def _undo_splits(self, leaf: Run) -> None:
        """Join the runs of a released path that share one state again and are neighbours in every tier's order."""
        run = next(iter(leaf.children.values())) if len(leaf.children) == 1 else leaf
        while run.parent is not None:
            if run.fits_parent() and run.is_queued_next_to_parent():
                self._residency.join(run)
            else:
                run = run.parent

    def _find(self, hashes: Sequence[BlockHash], limit: int) -> tuple[Run, int]:
        run, position = self.root, 0
        while position < limit:
            child = run.children.get(hashes[position])
            if child is None or (not child.on_device and child.open is not None):
                break  # not cached, or only reachable once its open copy to the host is handed over
            taken = child.common_blocks(hashes, position, min(child.length, limit - position))
            if taken < child.length:
                return child, taken
            run, position = child, position + taken
        return run, run.length

    # ---- looking

    def runs(self) -> Iterator[Run]:
        """Yield every findable run, parents before children. O(cache)."""
        subtree = self.root.subtree()
        next(subtree)
        return subtree
