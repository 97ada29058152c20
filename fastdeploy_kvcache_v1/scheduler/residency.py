"""Residency: which runs are in which tier, which of them may leave it, and which copies are open.

It owns the slots of cached blocks and gives them back to their pools, counts what could be evicted, and tells the
event log. It knows single runs, not the shape of the tree, and decides nothing. Every method costs O(1) plus the blocks
it copies or names, unless it says otherwise.
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


class Residency:
    """A run that can leave a tier is in the order of that tier (see `EvictionOrder`).

    One that cannot may be taken out when it gets in the way, and comes back when that changes: a run in use when its
    last user leaves, one that waits for the runs below it when the last of them has left the tier, one with an open
    copy when the step is taken. What the waiting line will hit leaves after everything else: its worth is known, not
    guessed.
    """

    def __init__(
        self,
        device_pool: BlockPool[DeviceSlot],
        host_pool: BlockPool[HostSlot],
        device_order: EvictionOrder,
        host_order: EvictionOrder,
        host_duplicates: HostDuplicates,
        events: EventLog,
    ) -> None:
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.device_order = device_order
        self.host_order = host_order
        self.host_duplicates = host_duplicates
        self._deferred = RunQueue()
        """Host copies that a search met while a copy of the open step fills or reads them."""
        self._held = RunQueue()
        """Host copies that a search met while a store reads their last slot: without it they make no room."""
        self._expected = RunQueue(), RunQueue()
        """What the waiting line needs of the device and of the host, the farthest need first."""
        self.num_device_evictable = 0
        """Blocks that device eviction can free at once; exact."""
        self._events = events
        self._open: dict[Run, None] = {}
        self._detached: dict[Run, None] = {}

    # ---- use

    def pin(self, run: Run) -> None:
        """One more request uses it."""
        if not run.pins and run.on_device:
            self.num_device_evictable -= run.length
        run.pins += 1

    def unpin(self, run: Run) -> None:
        """One request uses it no longer. A swap-in that no request waits for any more is cancelled, unless blocks below
        it are on the device.
        """
        run.pins -= 1
        if run.pins:
            return
        if run.detached:
            self._free_if_unused(run)
            return
        if run.open is CacheLevel.DEVICE and not run.num_device_children:
            self._take_device(run)
        if run.on_device:
            self.num_device_evictable += run.length
            if not run.is_queued and not run.num_device_children:
                self.device_order.use(run)
        host = run.host
        if host is not None and not host.is_queued and (run.on_device or not run.children):
            self._use_host(host)

    def touch(self, run: Run) -> None:
        """A request that used it has ended."""
        if run.detached:
            return
        if run.on_device:
            self.device_order.use(run)
        if run.host is not None:
            self._use_host(run.host)

    def _use_host(self, host: HostCopy) -> None:
        if not (self.host_duplicates.may_be and self.host_duplicates.take(host)):
            self.host_order.use(host)

    def expect(self, paths: Sequence[Sequence[Run]]) -> None:
        """Requests wait that will use the runs of `paths`, each in prompt order, the next one first; no others."""
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
        """`run`, in one tier and used by `pins` requests, has just been added to the tree."""
        run.pins = pins
        if not pins and run.on_device:
            self.num_device_evictable += run.length
            self.device_order.enter(run)
        elif not pins and run.host is not None:
            self.host_order.enter(run.host)
        self._events.stored(CacheLevel.DEVICE if run.on_device else CacheLevel.HOST, run)

    def give_device(self, run: Run, slots: Sequence[DeviceSlot]) -> None:
        """The pinned `run`, whose bytes are in `slots`, is on the device there from now on. Slots it had are free."""
        if run.on_device:
            assert run.open is None, "what a planned copy reads or fills stays where it is"
            self.device_pool.free(run.change_device_slots(slots))
        else:
            run.enter_device(slots)
            self._events.stored(CacheLevel.DEVICE, run)

    def extend_device(self, run: Run, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]) -> None:
        """Append blocks to a run that is on the device only and used by one request."""
        assert run.on_device and len(slots) == len(hashes), "one slot per block"
        self._events.stored(CacheLevel.DEVICE, run, hashes)
        run.extend(hashes, slots)

    def drop_device(self, run: Run) -> None:
        """Give up the device copy of an unpinned run that keeps its host copy."""
        assert run.host is not None and not run.pins, "only unpinned runs with a host copy may leave the device"
        self.num_device_evictable -= run.length
        self._events.removed(CacheLevel.DEVICE, run)
        self._take_device(run)

    def drop_host(self, run: Run) -> None:
        """Give up the host copy of a run that stays on the device."""
        assert run.on_device and run.open is None, "only runs that stay on the device may lose their host copy"
        self._events.removed(CacheLevel.HOST, run)
        self._take_host(run)

    def detach(self, run: Run) -> None:
        """It can no longer be found; its slots come back as soon as no request uses them."""
        if run.on_device:
            if not run.pins:
                self.num_device_evictable -= run.length
            run.leave_queue()
            self._events.removed(CacheLevel.DEVICE, run)
        if run.host is not None:
            run.host.leave_queue()
            self._events.removed(CacheLevel.HOST, run)
        run.detached = True
        self._detached[run] = None
        self._free_if_unused(run)

    def detach_all(
        self, in_use: Iterable[Run], other_device: Sequence[DeviceSlot], other_host: Sequence[HostSlot]
    ) -> list[Run]:
        """Nothing can be found any more. Runs `in_use`, which are all that are pinned, keep their slots, and host slots
        wait for their open copy; returns these runs. The rest is for the caller to forget.

        The other slots are owned outside the tree. O(runs in use + size of the pools).
        """
        kept = dict.fromkeys([*in_use, *self.open_copies(CacheLevel.HOST), *self._detached])
        for run in kept:
            run.detached = True
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
        """The run that is to leave the device next; None if none can. What cannot is out of the way now."""
        for run in chain(self.device_order.candidates(), self._expected[0]):
            if not run.pins and not run.num_device_children:
                return run
            run.leave_queue()
        return None

    def next_to_leave(self) -> Iterator[Run]:
        """Device runs in the order in which they will leave if nothing uses them. One in use is out of the way now. The
        caller may cut the run just yielded, and take host slots from others.
        """
        for run in chain(self.device_order.candidates(), self._expected[0]):
            if run.pins:
                run.leave_queue()
            else:
                yield run

    def next_host_victim(self, *, is_lost: bool = False) -> Run | None:
        """The run whose host copy is to go next; None if no copy can go. What cannot is out of the way now. `is_lost`:
        the next one that is lost with it, as if no copy could be spared.
        """
        host_duplicates = self.host_duplicates.youngest_first() if self.host_duplicates.may_be and not is_lost else ()
        return next(
            filter(self._is_host_victim, chain(host_duplicates, self.host_order.candidates(), self._expected[1])), None
        )

    def _is_host_victim(self, run: Run) -> bool:
        host = run.host
        assert host is not None
        is_used = run.pins and not host.is_duplicate
        must_wait = is_used or (run.children and not run.on_device)
        is_held = self.num_loose(run, 1) == 0
        if not must_wait and run.open is None and not is_held:
            return True
        self.host_duplicates.drop(host)
        if not must_wait:
            (self._held if run.open is None else self._deferred).touch(host)
        return False

    def num_loose(self, run: Run, most: int) -> int:
        """How many of its last blocks, at most `most`, have host slots that no store reads. O(`most`)."""
        if not self.host_pool.num_held:
            return min(most, run.length)
        last = reversed(run.slots(HOST, max(run.start, run.end - most), run.end))
        return sum(1 for _ in takewhile(lambda slot: not self.host_pool.is_held(slot), last))

    def host_store_ended(self) -> None:
        """What it read may leave the host again, before all others."""
        for place in self._held.drain(youngest_first=True):
            self.host_order.enter(place, first=True)

    def unblock(self, run: Run) -> None:
        """Perhaps `run` waited for what is over: runs below it in one of its tiers."""
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
        """`head` was cut from `run`, and is in its tiers."""
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
        """`run` takes over its parent; the parent's places go."""
        parent = run.parent
        assert parent is not None
        parent.leave_queue()
        if parent.host is not None:
            parent.host.leave_queue()
        run.take_over_parent()

    # ---- copies that the worker has not been told of

    def start_swap_in(self, run: Run, slots: Sequence[DeviceSlot]) -> None:
        """Open the copy of a pinned host run into device `slots`."""
        run.open = CacheLevel.DEVICE
        self._open[run] = None
        run.enter_device(slots)

    def start_swap_out(self, run: Run, slots: Sequence[HostSlot]) -> None:
        """Open the copy of a device run into host `slots`. The device side may go at once: evictions run first."""
        assert run.on_device and run.host is None and len(slots) == run.length, "one host slot per block"
        run.open = CacheLevel.HOST
        self._open[run] = None
        host = run.enter_host(slots)
        if not run.pins:
            self.host_order.enter(host)

    def open_copies(self, target: CacheLevel) -> list[Run]:
        return [run for run in self._open if run.open is target]

    def close_copies(self) -> None:
        """The worker is being told of every open copy: from here on, order guarantees what the tree says. (After a
        forced reset it never will be, and all of it is forgotten.)
        """
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
        """Runs that only wait for their last user."""
        return list(self._detached)

    def check(self, findable: Iterable[Run]) -> None:
        """Raises `InvariantError` naming the first broken invariant, given the whole tree, parents first; O(cache)."""
        runs = list(findable)
        check_runs(runs, self._detached.keys(), self._open.keys())
        sources = [slot for run in self.open_copies(CacheLevel.HOST) for slot in run.slots(DEVICE, run.start, run.end)]
        in_pool = all(0 <= slot < self.device_pool.size for slot in sources)
        expect(in_pool, "an open copy reads a device slot outside the pool")
        waiting = {run for run in runs if run.num_device_children}
        check_queue(self._device_queues(), {run: run for run in runs if run.on_device}, waiting, "device")
        waiting = {run for run in runs if run.children and not run.on_device}
        check_queue(self._host_queues(), {run: run.host for run in runs if run.host}, waiting, "host")
        host_duplicates = {run for run in runs if run.host is not None and run.host.is_duplicate}
        expect(
            host_duplicates == set(self.host_duplicates), "the queue of host duplicates misses some, or holds others"
        )
        device = sum(run.length for run in runs if run.on_device and not run.pins)
        expect(
            device == self.num_device_evictable, f"{device} device blocks evictable, not {self.num_device_evictable}"
        )

    def _device_queues(self) -> list[RunQueue]:
        return [*self.device_order.queues, self._expected[0]]

    def _host_queues(self) -> list[RunQueue]:
        return [*self.host_order.queues, self._expected[1], self._deferred, self._held, self.host_duplicates]

    # ---- inside

    def _take_device(self, run: Run) -> None:
        """Its swap-in is cancelled, if the worker does not know of it yet."""
        if run.open is CacheLevel.DEVICE:
            run.open = None
            del self._open[run]
        run.leave_queue()
        self.device_pool.free(run.leave_device())
        if run.host is not None and run.host.is_duplicate and not run.detached:
            self._use_host(run.host)
        if run.parent is not None:
            self.unblock(run.parent)

    def _take_host(self, run: Run) -> None:
        assert run.host is not None
        run.host.leave_queue()
        self.host_pool.free(run.host_slots)
        run.host = None

    def _free_if_unused(self, run: Run) -> None:
        """Slots of a detached run go back once no request uses them; host slots also wait for an open copy out."""
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
