"""Residency: which runs are in which tier, in what LRU order, and which copies are open.

It owns the slots of cached blocks and gives them back to their pools, counts what could be evicted, and tells the
event log. It knows single runs, not the shape of the tree, and decides nothing. Every method costs O(1) plus the blocks
it copies or names, unless it says otherwise. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .block_pool import DeviceBlockPool, HostBlockPool
from .event_log import EventLog
from .invariants import check_queue, check_runs, expect
from .metadata import BlockHash, CacheLevel, DeviceSlot, HostSlot
from .run import HostCopy, Run
from .run_queue import RunQueue


class Residency:
    """A run that can be evicted is in the queue of its tier; one in use may be taken out and comes back when unused."""

    def __init__(self, device_pool: DeviceBlockPool, host_pool: HostBlockPool, events: EventLog) -> None:
        self.device_queue = RunQueue()
        self.host_queue = RunQueue()
        self.num_device_evictable = 0
        """Blocks that device eviction can free at once; exact."""
        self.num_host_evictable = 0
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._events = events
        self._parked = RunQueue()
        """Host copies that stay until the step is taken: a copy that it starts fills them, or a run below them."""
        self._open: dict[Run, None] = {}
        self._detached: dict[Run, None] = {}

    # ---- use

    def pin(self, run: Run) -> None:
        """One more request uses it."""
        if not run.pins:
            self._count_evictable(run, -1)
        run.pins += 1

    def unpin(self, run: Run) -> None:
        """One request uses it no longer. A swap-in that nobody waits for any more is cancelled."""
        run.pins -= 1
        if run.pins:
            return
        if run.open is CacheLevel.DEVICE:  # the worker does not know of it yet
            self._take_device(run)
            run.open = None
            del self._open[run]
        if run.detached:
            self._free_if_unused(run)
            return
        self._count_evictable(run, 1)
        if run.device is not None and not run.is_queued:
            self.device_queue.touch(run)
        if run.host is not None and not run.host.is_queued:
            self.host_queue.touch(run.host)

    def touch(self, run: Run) -> None:
        """Make it the most recently used run of its tiers, unless it is detached."""
        if run.detached:
            return
        if run.device is not None:
            self.device_queue.touch(run)
        if run.host is not None:
            self.host_queue.touch(run.host)

    # ---- slots

    def give_device(self, run: Run, slots: Sequence[DeviceSlot]) -> None:
        """The pinned `run`, whose bytes are in `slots`, is now on the device."""
        self._put_on_device(run, slots)
        self._events.stored(CacheLevel.DEVICE, run.hashes, run.parent_hash)

    def extend_device(self, run: Run, hashes: Sequence[BlockHash], slots: Sequence[DeviceSlot]) -> None:
        """Append blocks to a run that is on the device only and used by one request."""
        assert run.device is not None and len(slots) == len(hashes), "one slot per block"
        self._events.stored(CacheLevel.DEVICE, hashes, run.hashes[-1])
        run.hashes += tuple(hashes)
        run.device += tuple(slots)

    def drop_device(self, run: Run) -> None:
        """Give up the device copy of an unpinned run that keeps its host copy."""
        assert run.host is not None and not run.pins, "only unpinned runs with a host copy may leave the device"
        self.num_device_evictable -= len(run.hashes)
        self._events.removed(CacheLevel.DEVICE, run.hashes)
        self._take_device(run)

    def drop_host(self, run: Run) -> None:
        """Give up the host copy of a run that stays on the device."""
        assert run.device is not None and run.open is None, "only runs that stay on the device may lose their host copy"
        if run.is_host_evictable:
            self.num_host_evictable -= len(run.hashes)
        host, run.host = run.host, None
        assert host is not None
        self.host_queue.discard(host)
        self._host_pool.free(host.slots)
        self._events.removed(CacheLevel.HOST, run.hashes)

    def detach(self, run: Run) -> None:
        """It can no longer be found; its slots come back as soon as nobody uses them."""
        if not run.pins:
            self._count_evictable(run, -1)
        if run.device is not None:
            self.device_queue.discard(run)
            if run.open is not CacheLevel.DEVICE:
                self._events.removed(CacheLevel.DEVICE, run.hashes)
        if run.host is not None:
            self.host_queue.discard(run.host)
            if run.open is not CacheLevel.HOST:
                self._events.removed(CacheLevel.HOST, run.hashes)
        run.detached = True
        self._detached[run] = None
        self._free_if_unused(run)

    def park(self, run: Run) -> None:
        """Take a run whose host copy must stay for now out of the way of the search for host victims."""
        assert run.host is not None
        if run.pins:
            self.host_queue.discard(run.host)  # its last user puts it back
        else:
            self._parked.touch(run.host)

    # ---- cutting and joining

    def split(self, head: Run, run: Run) -> None:
        """`head` is the new upper part of `run`: it takes its share of the slots and the places next to `run`'s."""
        count = len(head.hashes)
        if run.device is not None:
            head.device, run.device = run.device[:count], run.device[count:]
            if run.is_queued:
                self.device_queue.insert_after(head, run)
        if run.host is not None:
            head.host, run.host.slots = HostCopy(head, run.host.slots[:count]), run.host.slots[count:]
            if run.host.is_queued:
                self.host_queue.insert_after(head.host, run.host)
        if run.open is not None:
            self._open[head] = None

    def join(self, run: Run, parent: Run) -> None:
        """`run` takes over the slots of `parent`, which is in the same tiers; their places in the queues go."""
        if run.device is not None:
            assert parent.device is not None
            run.device = parent.device + run.device
            self.device_queue.discard(parent)
        if run.host is not None:
            assert parent.host is not None
            run.host.slots = parent.host.slots + run.host.slots
            self.host_queue.discard(parent.host)
            parent.host = None  # no garbage that refers to itself

    # ---- copies that the worker has not been told of

    def start_swap_in(self, run: Run, slots: Sequence[DeviceSlot]) -> None:
        """Open the copy of a pinned host run into device `slots`."""
        run.open = CacheLevel.DEVICE
        self._open[run] = None
        self._put_on_device(run, slots)

    def start_swap_out(self, run: Run, slots: Sequence[HostSlot]) -> None:
        """Open the copy of a device run into host `slots`. The device side may go at once: evictions run first."""
        assert run.host is None and len(slots) == len(run.hashes), "one host slot per block"
        run.open = CacheLevel.HOST
        self._open[run] = None
        run.host = HostCopy(run, tuple(slots))
        self.host_queue.touch(run.host)

    def open_copies(self, target: CacheLevel) -> list[Run]:
        return [run for run in self._open if run.open is target]

    def close_copies(self) -> None:
        """The worker is being told of every open copy: from here on, order guarantees what the tree says."""
        for run in self._open:
            level, run.open = run.open, None
            assert level is not None
            if run.detached:
                self._free_if_unused(run)
                continue
            self._events.stored(level, run.hashes, run.parent_hash)
            if run.is_host_evictable:
                self.num_host_evictable += len(run.hashes)
        self._open.clear()
        self.host_queue.put_back(self._parked)

    def abandon_copies(self) -> None:
        """Forget open copies that will never be handed to a worker (everything has been detached and released)."""
        for run in self._open:
            run.open = None
            self._free_if_unused(run)
        self._open.clear()

    # ---- looking

    def detached_runs(self) -> Iterator[Run]:
        """Runs that only wait for their last user."""
        return iter(self._detached)

    def check(self, findable: Iterable[Run]) -> None:
        """Raises `InvariantError` naming the first broken invariant, given the whole tree, parents first; O(cache)."""
        runs = list(findable)
        check_runs(runs, self._detached.keys(), self._open.keys())
        check_queue([self.device_queue], {run for run in runs if run.device is not None}, "device")
        check_queue([self.host_queue, self._parked], {run for run in runs if run.host is not None}, "host")
        device = sum(len(run.hashes) for run in runs if run.device is not None and not run.pins)
        host = sum(len(run.hashes) for run in runs if run.is_host_evictable)
        expect(
            device == self.num_device_evictable, f"{device} device blocks evictable, not {self.num_device_evictable}"
        )
        expect(host == self.num_host_evictable, f"{host} host blocks evictable, not {self.num_host_evictable}")

    # ---- inside

    def _count_evictable(self, run: Run, sign: int) -> None:
        """The findable `run`, which nobody uses, becomes (1) or is no longer (-1) evictable where it is."""
        if run.device is not None:
            self.num_device_evictable += sign * len(run.hashes)
        if run.host is not None and run.open is None:
            self.num_host_evictable += sign * len(run.hashes)

    def _put_on_device(self, run: Run, slots: Sequence[DeviceSlot]) -> None:
        assert run.pins and run.device is None and len(slots) == len(run.hashes), "a run in use gets one slot per block"
        run.device = tuple(slots)  # queued when its last user leaves

    def _take_device(self, run: Run) -> None:
        slots, run.device = run.device, None
        assert slots is not None
        self.device_queue.discard(run)
        self._device_pool.free(slots)

    def _free_if_unused(self, run: Run) -> None:
        """Slots of a detached run go back once no request uses them; host slots also wait for an open copy."""
        if run.pins:
            return
        if run.device is not None:
            self._take_device(run)
        if run.open is None:
            if run.host is not None:
                host, run.host = run.host, None
                self._host_pool.free(host.slots)
            del self._detached[run]
