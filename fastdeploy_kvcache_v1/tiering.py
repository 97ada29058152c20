"""Tiering: which block leaves which tier, and what is copied, under a write policy.

Collects the copies of the scheduling step that is being decided. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from .block_pool import DeviceBlockPool, HostBlockPool
from .cache_stats import Counters
from .config import KVCacheConfig, WritePolicy
from .errors import PoolInUseError
from .invariants import expect
from .metadata import NO_EVICT, NO_SWAP_IN, CacheLevel, CacheSwapMetadata, DeviceSlot, HostSlot, NoSpace, SwapStep
from .radix_tree import RadixTree
from .residency import Residency
from .run import Run


class Tiering:
    """Makes room in a tier, backs blocks up to the host, and batches the copies of a step."""

    def __init__(
        self,
        config: KVCacheConfig,
        tree: RadixTree,
        residency: Residency,
        device_pool: DeviceBlockPool,
        host_pool: HostBlockPool,
        counters: Counters,
    ) -> None:
        self._policy = config.write_policy
        self._threshold = config.write_through_threshold
        self._tree = tree
        self._residency = residency
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._counters = counters
        self._evict_sources: list[DeviceSlot] = []
        self._evict_targets: list[HostSlot] = []

    @property
    def num_available_device(self) -> int:
        """Device slots that `allocate_device` can hand out."""
        return self._device_pool.num_free + self._residency.num_device_evictable

    def allocate_device(self, count: int) -> list[DeviceSlot] | NoSpace:
        """`count` slots, evicting the least recently used blocks where they are short. `NoSpace` changes nothing."""
        pool = self._device_pool
        if count - pool.num_free > self._residency.num_device_evictable:
            self._counters.allocations_refused += 1
            return NoSpace(count, self.num_available_device)
        while (short := count - pool.num_free) > 0:
            victim = self._tree.device_victim(short)
            assert victim is not None, "blocks counted as evictable can be evicted"
            self._evict_device(victim)
        return pool.allocate(count)

    def back_up_completed(self, path: Iterable[Run], num_new: int) -> None:
        """The last `num_new` blocks of `path` have just been computed."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            skipped = self._back_up(path)  # retries those for which there was no room before
            self._counters.backup_skipped_blocks += min(skipped, num_new)

    def back_up_hit(self, path: Iterable[Run]) -> None:
        """Blocks of `path` have just been hit once more."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._counters.backup_skipped_blocks += self._back_up(path)
        elif self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            wanted = (run for run in path if run.hits >= self._threshold)
            self._counters.backup_skipped_blocks += self._back_up(wanted)

    def take_step(self, step: int) -> SwapStep:
        """Hand over the copies decided since the last call; from now on they count as done, by order."""
        swap_ins = self._residency.open_copies(CacheLevel.DEVICE)
        sources = [slot for run in swap_ins for slot in run.host_slots or ()]
        targets = [slot for run in swap_ins for slot in run.device or ()]
        evict = _copies(NO_EVICT, self._evict_sources, self._evict_targets)
        swap_in = _copies(NO_SWAP_IN, sources, targets)
        self._counters.swap_out_blocks += len(evict)
        self._counters.swap_in_blocks += len(swap_in)
        self._evict_sources, self._evict_targets = [], []
        self._residency.close_copies()
        return SwapStep(step, evict, swap_in)

    def abandon(self) -> None:
        """Forget all copies decided but not handed over (after everything has been detached and released)."""
        self._evict_sources, self._evict_targets = [], []
        self._residency.abandon_copies()

    def evict_above(self, size: int) -> None:
        """Clear the device slots from `size` on of cached blocks, without copies; blocks below them go too.

        Raises `PoolInUseError`, with no change, when a request uses one of them or one still waits to be copied out.
        O(cache).
        """
        above = self._device_pool.slots_above(size)
        hit = [run for run in self._tree.runs() if run.device is not None and not above.isdisjoint(run.device)]
        evictable = {slot for run in hit if not run.pins for slot in run.device or ()}
        in_use = (above - evictable) | {slot for slot in self._evict_sources if slot >= size}
        if in_use:
            raise PoolInUseError(
                f"cannot shrink the device pool to {size} blocks: {len(in_use)} blocks above are in use; "
                "finish or preempt their requests first"
            )
        for run in hit:
            self._evict_subtree(run, above)

    def forget_failed(self, target: CacheLevel, failed: Set[int]) -> set[Run]:
        """Forget the copies in the `failed` slots of tier `target`, and the blocks below those that are nowhere else.

        Returns the runs that can no longer be found; some may still be in use. O(cache).
        """
        lost: set[Run] = set()
        for run in list(self._tree.runs()):
            if run.detached:
                continue
            if target is CacheLevel.HOST and run.device is not None and run.open is not CacheLevel.DEVICE:
                if run.open is None and run.host is not None and not failed.isdisjoint(run.host.slots):
                    self._residency.drop_host(run)
                continue
            slots = run.device if target is CacheLevel.DEVICE else run.host_slots
            first = next((index for index, slot in enumerate(slots or ()) if slot in failed), None)
            if first is not None:
                if first:
                    self._tree.split(run, first)
                lost.update(self._tree.detach(run))
        return lost

    def _evict_subtree(self, run: Run, above: Set[int]) -> None:
        """Evict an unpinned `run` from its first block in `above` on, and every device block below, without copies."""
        if run.device is None:
            return  # gone with an earlier run
        first = next(index for index, slot in enumerate(run.device) if slot in above)
        if first:
            self._tree.split(run, first)
        for victim in reversed([below for below in run.subtree() if below.device is not None]):
            self._counters.device_evicted_blocks += len(victim.hashes)
            self._drop_device(victim)

    def _evict_device(self, run: Run) -> None:
        """Take the device slots of an evictable `run`, saving its blocks to the host if the policy says so."""
        self._counters.device_evicted_blocks += len(run.hashes)
        if run.host is None and self._policy is WritePolicy.WRITE_BACK:
            room = self._make_host_room(len(run.hashes))
            if 0 < room < len(run.hashes):
                self._start_swap_out(self._tree.split(run, room))
                self._counters.device_evicted_blocks -= room  # the upper part stays, and is the next victim
                self._counters.backup_skipped_blocks += len(run.hashes)
            elif room:
                self._start_swap_out(run)
            else:
                self._counters.backup_skipped_blocks += len(run.hashes)
        self._drop_device(run)

    def _drop_device(self, run: Run) -> None:
        if run.host is not None:
            self._residency.drop_device(run)
            return
        self._counters.device_lost_blocks += len(run.hashes)
        below = self._tree.detach(run)[1:]  # could not be found any more
        self._counters.host_evicted_blocks += sum(len(run.hashes) for run in below)

    def _back_up(self, path: Iterable[Run]) -> int:
        """Start copies of the blocks of `path`, all on the device; returns for how many there was no room."""
        skipped = 0
        for run in path:
            if run.host is not None:
                continue
            room = self._make_host_room(len(run.hashes))
            skipped += len(run.hashes) - room
            if room:
                self._start_swap_out(run if room == len(run.hashes) else self._tree.split(run, room))
        return skipped

    def check(self) -> None:
        """Raises `InvariantError` unless every copy to hand over fills a slot that is kept for it."""
        expect(len(self._evict_sources) == len(self._evict_targets), "tiering: copies without a source or a target")
        waiting = [slot for run in self._residency.open_copies(CacheLevel.HOST) for slot in run.host_slots or ()]
        expect(sorted(waiting) == sorted(self._evict_targets), "tiering: open copies and host slots disagree")

    def _start_swap_out(self, run: Run) -> None:
        assert run.device is not None
        slots = self._host_pool.allocate(len(run.hashes))
        self._evict_sources += run.device
        self._evict_targets += slots
        self._residency.start_swap_out(run, slots)

    def _make_host_room(self, count: int) -> int:
        """Evict from the host until `count` slots are free or nothing evictable is left; returns how many are."""
        while (short := count - self._host_pool.num_free) > 0:
            victim = self._tree.host_victim(short)
            if victim is None:
                return self._host_pool.num_free
            self._counters.host_evicted_blocks += len(victim.hashes)
            if victim.device is not None:
                self._residency.drop_host(victim)
            else:
                self._tree.detach(victim)
        return count


def _copies(none: CacheSwapMetadata, sources: Sequence[int], targets: Sequence[int]) -> CacheSwapMetadata:
    """Copies in the direction of `none`, which it is if there are none: most steps have none."""
    return CacheSwapMetadata(none.source, none.target, tuple(sources), tuple(targets)) if sources else none
