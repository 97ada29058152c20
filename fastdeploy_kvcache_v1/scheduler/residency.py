"""Residency: which runs are in which tier, which of them can be evicted, and which copies are open.

It owns the slots of cached blocks, frees them, counts evictable blocks and writes the event log. It sees single runs,
not the tree, and decides nothing. A method costs O(1) plus O(blocks copied or named) unless its docstring says
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile

from ..contract.messages import BlockHash, CacheLevel, DeviceSlot, HostSlot
from .block_pool import BlockPool
from .event_log import EventLog
from .invariants import check_queue, check_runs, expect
from .policies.eviction import EvictionOrder
from .policies.host_duplicates import HostDuplicates
from .run import DEVICE, HOST, HostCopy, Run, RunQueue
from .traffic.evicted_pieces import EVICTED_DEVICE, EVICTED_HOST, RESET, EvictedPieces


class Residency:
    """Keeps each run that can leave a tier in the order of that tier (see `EvictionOrder`).

    A run that cannot leave yet is removed from the order when a search meets it. It is put back when the reason ends:
    its last user leaves, the runs below it are gone, or its copy's step is taken. Runs that waiting requests will hit
    leave last.
    """

    def __init__(
        self,
        device_pool: BlockPool[DeviceSlot],
        host_pool: BlockPool[HostSlot],
        device_order: EvictionOrder,
        host_order: EvictionOrder,
        host_duplicates: HostDuplicates,
        events: EventLog,
        pieces: EvictedPieces,
    ) -> None:
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.device_order = device_order
        self.host_order = host_order
        self.host_duplicates = host_duplicates
        self._deferred = RunQueue()
        """Host copies that a search met while an open copy filled or read them."""
        self._held = RunQueue()
        """Host copies that a search met while a store read their last slot: evicting them makes no room."""
        self._expected = RunQueue(), RunQueue()
        """Places on the device and on the host that waiting requests will hit, the last one needed first."""
        self.num_device_evictable = 0
        """Exact number of blocks that device eviction can free at once."""
        self._events = events
        self.pieces = pieces
        self._open: dict[Run, None] = {}
        self._detached: dict[Run, None] = {}

    # ---- use

    def pin(self, run: Run) -> None:
        if not run.pins and run.on_device:
            self.num_device_evictable -= run.length
        run.pins += 1

    def unpin(self, run: Run, *, touch: bool) -> None:
        """Drop one pin. The last one cancels an open swap-in, unless blocks below the run are on the device. `touch`: a
        request that used `run` has ended.
        """
        run.pins -= 1
        if run.detached:
            self._free_if_unused(run)
            return
        if touch:
            if run.on_device:
                self.device_order.use(run)
            if run.host is not None:
                self._use_host(run.host)
        if run.pins:
            return
        if run.open is CacheLevel.DEVICE and not run.num_device_children:
            self._leave_device(run)
        if run.on_device:
            self.num_device_evictable += run.length
            if not run.is_queued and not run.num_device_children:
                self.device_order.use(run)
        host = run.host
        if host is not None and not host.is_queued and (run.on_device or not run.children):
            self._use_host(host)

    def requeue(self, run: Run) -> None:
        """Put `run` in the queues of its class, as if just used, if it is queued at all."""
        if run.is_queued:
            self.device_order.use(run)
        if run.host is not None and run.host.is_queued and not run.host.is_duplicate:
            self.host_order.use(run.host)

    def _use_host(self, host: HostCopy) -> None:
        duplicates = self.host_duplicates
        if not ((host.is_duplicate or duplicates.are_wanted) and duplicates.take(host)):
            self.host_order.use(host)

    def expect(self, paths: Sequence[Sequence[Run]]) -> None:
        """Let the runs of `paths` alone leave last. Paths are in prompt order, that of the next request first."""
        on_device, on_host = self._expected
        for queue, order in ((on_device, self.device_order), (on_host, self.host_order)):
            for place in queue.drain():
                order.use(place)
        for path in reversed(paths):
            for run in reversed(path):
                if run.on_device:
                    on_device.touch(run)
                if run.host is not None and not run.host.is_duplicate:
                    on_host.touch(run.host)

    # ---- slots

    def add(self, run: Run, *, pins: int = 0) -> None:
        """Register `run`, which was just added to the tree, is in one tier and is used by `pins` requests."""
        run.pins = pins
        if not pins and run.on_device:
            self.num_device_evictable += run.length
            self.device_order.enter(run)
        elif not pins and run.host is not None:
            self.host_order.enter(run.host)
        self._events.stored(CacheLevel.DEVICE if run.on_device else CacheLevel.HOST, run)

    def give_device(self, run: Run, slots: Sequence[DeviceSlot]) -> None:
        """Put the pinned `run` on the device in `slots`, which hold its bytes. Device slots that it had are freed."""
        if run.on_device:
            assert run.open is None, "slots of an open copy must not change"
            self.device_pool.free(run.change_device_slots(slots))
        else:
            run.enter_device(slots)
            self._events.stored(CacheLevel.DEVICE, run)

    def extend_device(self, run: Run, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]) -> None:
        """Append blocks to a run that is on the device only and used by one request."""
        assert run.on_device and len(slots) == len(hashes), "one slot per block"
        self._events.stored(CacheLevel.DEVICE, run, hashes)
        run.extend(hashes, slots)

    def drop_last(self, run: Run, count: int) -> None:
        """Forget the last `count` blocks of an unpinned run that is on the device only, has no runs below it and ends
        its cells.
        """
        assert not run.pins and run.host is None and not run.children, "only a leaf on the device alone gets shorter"
        self.pieces.add(run, run.end - count, EVICTED_DEVICE)
        self.num_device_evictable -= count
        self._events.removed(CacheLevel.DEVICE, run, count)
        self.device_pool.free(run.drop_last(count))

    def drop_device(self, run: Run) -> None:
        """Free the device slots of an unpinned run that keeps its host copy."""
        assert run.host is not None and not run.pins, "only unpinned runs with a host copy may leave the device"
        self.num_device_evictable -= run.length
        self._events.removed(CacheLevel.DEVICE, run)
        self._leave_device(run)

    def drop_host(self, run: Run) -> None:
        """Free the host slots of a run that stays on the device."""
        assert run.on_device and run.open is None, "only runs that stay on the device may lose their host copy"
        self._events.removed(CacheLevel.HOST, run)
        self._take_host(run)

    def detach(self, run: Run, cause: int | None = None) -> None:
        """Register that `run` was removed from the tree. Its slots are freed as soon as no request uses them. `cause`:
        see `EvictedPieces.add`; None: it was evicted.
        """
        if cause is None:
            cause = EVICTED_DEVICE if run.on_device else EVICTED_HOST
        self.pieces.add(run, run.start, cause)
        if run.on_device:
            if not run.pins:
                self.num_device_evictable -= run.length
            run.leave_queue()
            self._events.removed(CacheLevel.DEVICE, run)
        if run.host is not None:
            run.host.leave_queue()
            self._events.removed(CacheLevel.HOST, run)
        if run.owner is not None and run.owner.leaf is run:
            run.owner.leaf = run.parent if run.parent is not None and run.parent.owner is run.owner else None
        run.detached = True
        self._detached[run] = None
        self._free_if_unused(run)

    def detach_all(
        self, in_use: Iterable[Run], other_device: Sequence[DeviceSlot], other_host: Sequence[HostSlot]
    ) -> list[Run]:
        """Register that the tree was emptied. Returns the runs that keep slots; the caller must drop all others.

        `in_use`, which must be all pinned runs, keep all slots. Runs with an open swap-out keep their host slots.
        `other_device` and `other_host` are owned outside the tree. O(runs in use + size of the pools).
        """
        kept = dict.fromkeys([*in_use, *self.open_copies(CacheLevel.HOST), *self._detached])
        for run in kept:
            if not run.detached:
                self.pieces.add(run, run.start, RESET)
            run.detached = True
            run.disown()
            run.older = run.younger = None
            if run.host is not None:
                run.host.older = run.host.younger = None
            if not run.pins:
                run.on_device = False
                if run.open is CacheLevel.DEVICE:
                    run.open = None
        self._detached = kept
        self._open = {run: None for run in kept if run.open is not None}
        for queue in (*self._device_queues(), *self._host_queues()):
            queue.forget()
        self.num_device_evictable = 0
        self.device_pool.keep_only([*other_device, *(slot for run in kept for slot in run.device_slots)])
        self.host_pool.keep_only([*other_host, *(slot for run in kept for slot in run.host_slots)])
        self._events.cleared()
        return list(kept)

    # ---- the search for victims

    def next_device_victim(self) -> Run | None:
        """Return the run to evict from the device next, or None. Removes runs that cannot leave yet from the order."""
        while (run := self.device_order.first() or self._expected[0].oldest()) is not None:
            if not run.pins and not run.num_device_children:
                return run
            run.leave_queue()
        return None

    def next_to_leave(self) -> Iterator[Run]:
        """Yield device runs in eviction order, as if none were used again. Removes pinned runs from the order. The
        caller may cut the run just yielded, and evict host copies.
        """
        for run in chain(self.device_order.candidates(), self._expected[0]):
            if run.pins:
                run.leave_queue()
            else:
                yield run

    def next_host_victim(self, *, is_lost: bool = False) -> Run | None:
        """Return the run to evict from the host next, or None. Removes runs that cannot leave yet from the order.

        `is_lost`: skip duplicates, so that the result is the next run whose content would be lost.
        """
        while True:
            duplicate = None if is_lost else self.host_duplicates.youngest()
            run = duplicate or self.host_order.first() or self._expected[1].oldest()
            if run is None or self._is_host_victim(run):
                return run

    def _is_host_victim(self, run: Run) -> bool:
        host = run.host
        assert host is not None
        is_used = run.pins and not host.is_duplicate
        must_wait = is_used or (run.children and not run.on_device)
        is_held = self.host_pool.num_held and not self.num_loose(run, 1)
        if not must_wait and run.open is None and not is_held:
            return True
        self.host_duplicates.drop(host)
        if not must_wait:
            (self._held if run.open is None else self._deferred).touch(host)
        return False

    def num_loose(self, run: Run, most: int) -> int:
        """Count its last blocks, at most `most`, whose host slots no store reads. O(most)."""
        if not self.host_pool.num_held:
            return min(most, run.length)
        last = reversed(run.slots(HOST, max(run.start, run.end - most), run.end))
        return sum(1 for _ in takewhile(lambda slot: not self.host_pool.is_held(slot), last))

    def host_store_ended(self) -> None:
        """Let the runs that a store held leave the host again, before all others."""
        for place in self._held.drain(youngest_first=True):
            self.host_order.enter(place, first=True)

    def unblock(self, run: Run) -> None:
        """Put `run` back into the orders if it only waited for runs below it, which may be gone now."""
        if run.pins or run.detached:
            return
        if run.on_device and not run.is_queued and not run.num_device_children:
            self.device_order.enter(run, first=True)
        host = run.host
        waits = host is None or host.is_queued or (run.children and not run.on_device)
        if host is not None and not waits and not (self.host_duplicates.may_be and self.host_duplicates.take(host)):
            self.host_order.enter(host, first=True)

    # ---- cutting and joining

    def split(self, head: Run, run: Run) -> None:
        """Register `head`, which was cut from `run`: it is in the same tiers."""
        if run.is_queued:  # lower blocks leave first, and parts that stay neighbours can be joined
            head.enter_after(run)
        if run.host is not None:
            head.host = HostCopy(head)
            head.host.is_duplicate = run.host.is_duplicate
            if run.host.is_queued:
                head.host.enter_after(run.host)
        if run.open is not None:
            self._open[head] = None

    def join(self, run: Run) -> None:
        """Join `run` with its parent. The parent's places in the orders are dropped."""
        parent = run.parent
        assert parent is not None
        parent.leave_queue()
        if parent.host is not None:
            parent.host.leave_queue()
        if parent.owner is not None and parent.owner.leaf is parent:
            parent.owner.leaf = run
        run.take_over_parent()

    # ---- open copies: the worker does not know of them yet

    def start_swap_in(self, run: Run, slots: Sequence[DeviceSlot]) -> None:
        """Open the copy of a pinned host run into device `slots`."""
        run.open = CacheLevel.DEVICE
        self._open[run] = None
        run.enter_device(slots)

    def start_swap_out(self, run: Run, slots: Sequence[HostSlot]) -> None:
        """Open the copy of a device run into host `slots`. Its device slots can be reused: swap-outs run first."""
        assert run.on_device and run.host is None and len(slots) == run.length, "one host slot per block"
        run.open = CacheLevel.HOST
        self._open[run] = None
        host = run.enter_host(slots)
        if not run.pins:
            self.host_order.enter(host)

    def open_copies(self, target: CacheLevel) -> list[Run]:
        return [run for run in self._open if run.open is target]

    def close_copies(self) -> None:
        """Close all open copies: their step is taken, or a forced reset dropped it. Their targets count as filled."""
        for run in self._open:
            level, run.open = run.open, None
            assert level is not None
            if run.detached:
                self._free_if_unused(run)
                continue
            self._events.stored(level, run)
            if level is CacheLevel.DEVICE and run.host is not None and self.host_duplicates.are_wanted:
                self.host_duplicates.take(run.host)
        self._open.clear()
        for place in self._deferred.drain(youngest_first=True):
            self.host_order.enter(place, first=True)

    # ---- looking

    def detached_runs(self) -> list[Run]:
        return list(self._detached)

    def check(self, findable: Iterable[Run]) -> None:
        """Raise `InvariantError` for a broken invariant. `findable`: the whole tree, parents first; O(cache)."""
        runs = list(findable)
        check_runs(runs, self._detached.keys(), self._open.keys())
        sources = [slot for run in self.open_copies(CacheLevel.HOST) for slot in run.slots(DEVICE, run.start, run.end)]
        in_pool = all(0 <= slot < self.device_pool.size for slot in sources)
        expect(in_pool, "an open copy reads a device slot outside the pool")
        waiting = {run for run in runs if run.num_device_children}
        check_queue(self._device_queues(), {run: run for run in runs if run.on_device}, waiting, "device")
        waiting = {run for run in runs if run.children and not run.on_device}
        check_queue(self._host_queues(), {run: run.host for run in runs if run.host}, waiting, "host")
        duplicates = {run for run in runs if run.host is not None and run.host.is_duplicate}
        expect(duplicates == set(self.host_duplicates), "the queue of host duplicates differs from the marked copies")
        num_evictable = sum(run.length for run in runs if run.on_device and not run.pins)
        counted = self.num_device_evictable
        expect(num_evictable == counted, f"{num_evictable} device blocks are evictable, {counted} are counted")

    def _device_queues(self) -> list[RunQueue]:
        return [*self.device_order.queues, self._expected[0]]

    def _host_queues(self) -> list[RunQueue]:
        return [*self.host_order.queues, self._expected[1], self._deferred, self._held, self.host_duplicates]

    # ---- inside

    def _leave_device(self, run: Run) -> None:
        """Take a findable run, which keeps its host copy, off the device."""
        run.leave_queue()
        self._take_device(run)
        if run.host is not None and run.host.is_duplicate:
            self._use_host(run.host)
        if run.parent is not None:
            self.unblock(run.parent)

    def _take_device(self, run: Run) -> None:
        """Free the device slots of `run` and cancel its open swap-in."""
        if run.open is CacheLevel.DEVICE:
            run.open = None
            del self._open[run]
        self.device_pool.free(run.leave_device())

    def _take_host(self, run: Run) -> None:
        assert run.host is not None
        run.host.leave_queue()
        self.host_pool.free(run.host_slots)
        run.host = None

    def _free_if_unused(self, run: Run) -> None:
        """Free the slots of a detached run, unless a request uses it; host slots also wait for an open swap-out."""
        if run.pins:
            return
        if run.on_device:
            self._take_device(run)
        if run.open is None:
            if run.host is not None:
                self._take_host(run)
            if run.parent is not None and run.parent.detached:
                run.leave_parent()
            run.drop_children()
            run.drop_cells()
            del self._detached[run]
