"""Tiering: which block leaves which tier, and what is copied, under a write policy.

Collects the copies of the scheduling step that is being decided. Not thread-safe: the manager's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from .block_pool import DeviceBlockPool, HostBlockPool
from .cache_stats import Counters
from .config import KVCacheConfig, WritePolicy
from .errors import InvariantError, PoolInUseError
from .metadata import CacheLevel, CacheSwapMetadata, DeviceSlot, HostSlot, SwapStep
from .radix_tree import RadixTree
from .run import Run, expect


class Tiering:
    """Makes room in a tier, backs blocks up to the host, and batches the copies of a step."""

    def __init__(
        self,
        config: KVCacheConfig,
        tree: RadixTree,
        device_pool: DeviceBlockPool,
        host_pool: HostBlockPool,
        counters: Counters,
    ) -> None:
        self._policy = config.write_policy
        self._threshold = config.write_through_threshold
        self._tree = tree
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._counters = counters
        self._evict_sources: list[DeviceSlot] = []
        self._evict_targets: list[HostSlot] = []

    @property
    def num_available_device(self) -> int:
        """Device slots that `allocate_device` can hand out."""
        return self._device_pool.num_free + self._tree.num_device_evictable

    def allocate_device(self, count: int) -> list[DeviceSlot]:
        """`count <= num_available_device` slots, evicting the least recently used blocks where they are short."""
        while (short := count - self._device_pool.num_free) > 0:
            victim = self._tree.device_victim(short)
            if victim is None:
                raise InvariantError(f"{short} device blocks counted as evictable could not be evicted")
            self._evict_device(victim)
        return self._device_pool.allocate(count)

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
        swap_ins = self._tree.open_swap_ins()
        evict = CacheSwapMetadata(
            CacheLevel.DEVICE, CacheLevel.HOST, tuple(self._evict_sources), tuple(self._evict_targets)
        )
        swap_in = CacheSwapMetadata(
            CacheLevel.HOST,
            CacheLevel.DEVICE,
            tuple(slot for run in swap_ins for slot in run.host or ()),
            tuple(slot for run in swap_ins for slot in run.device or ()),
        )
        self._counters.swap_out_blocks += len(evict)
        self._counters.swap_in_blocks += len(swap_in)
        self._evict_sources, self._evict_targets = [], []
        self._tree.close_transfers()
        return SwapStep(step, evict, swap_in)

    def abandon(self) -> None:
        """Forget all copies decided but not handed over (after everything has been detached and released)."""
        self._evict_sources, self._evict_targets = [], []
        self._tree.abandon_transfers()

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
                if run.open is None and run.host is not None and not failed.isdisjoint(run.host):
                    self._tree.drop_host(run)
                continue
            slots = run.device if target is CacheLevel.DEVICE else run.host
            first = next((index for index, slot in enumerate(slots or ()) if slot in failed), None)
            if first is not None:
                if first:
                    self._tree.split(run, first)
                lost.update(self._tree.detach(run))
        return lost

    def _evict_subtree(self, run: Run, above: Set[int]) -> None:
        """Evict an unpinned `run` from its first block in `above` on, and every device block below, without copies."""
        if run.detached or run.device is None:
            return  # gone with an earlier run
        first = next(index for index, slot in enumerate(run.device) if slot in above)
        if first:
            self._tree.split(run, first)
        for victim in reversed([below for below in run.subtree() if below.device is not None]):
            self._counters.device_evicted_blocks += len(victim)
            self._drop_device(victim)

    def _evict_device(self, run: Run) -> None:
        """Take the device slots of an evictable `run`, saving its blocks to the host if the policy says so."""
        self._counters.device_evicted_blocks += len(run)
        if run.host is None and self._policy is WritePolicy.WRITE_BACK:
            room = self._make_host_room(len(run))
            if 0 < room < len(run):
                self._start_swap_out(self._tree.split(run, room))
                self._counters.device_evicted_blocks -= room  # the upper part stays, and is the next victim
                self._counters.backup_skipped_blocks += len(run)
            elif room:
                self._start_swap_out(run)
            else:
                self._counters.backup_skipped_blocks += len(run)
        self._drop_device(run)

    def _drop_device(self, run: Run) -> None:
        if run.host is not None:
            self._tree.drop_device(run)
            return
        self._counters.device_lost_blocks += len(run)
        below = self._tree.detach(run)[1:]  # could not be found any more
        self._counters.host_evicted_blocks += sum(map(len, below))

    def _back_up(self, path: Iterable[Run]) -> int:
        """Start copies of the blocks of `path` that are on the device only; returns for how many there was no room."""
        skipped = 0
        for run in path:
            if run.host is not None or run.device is None:
                continue
            room = self._make_host_room(len(run))
            skipped += len(run) - room
            if room:
                self._start_swap_out(run if room == len(run) else self._tree.split(run, room))
        return skipped

    def check(self) -> None:
        """Raises `InvariantError` unless every copy to hand over fills a slot that is kept for it."""
        expect(len(self._evict_sources) == len(self._evict_targets), "tiering: copies without a source or a target")
        waiting = [slot for run in self._tree.open_swap_outs() for slot in run.host or ()]
        expect(sorted(waiting) == sorted(self._evict_targets), "tiering: open copies and host slots disagree")

    def _start_swap_out(self, run: Run) -> None:
        assert run.device is not None
        slots = self._host_pool.allocate(len(run))
        self._evict_sources += run.device
        self._evict_targets += slots
        self._tree.start_swap_out(run, slots)

    def _make_host_room(self, count: int) -> int:
        """Evict from the host until `count` slots are free or nothing evictable is left; returns how many are."""
        while (short := count - self._host_pool.num_free) > 0:
            victim = self._tree.host_victim(short)
            if victim is None:
                return self._host_pool.num_free
            self._counters.host_evicted_blocks += len(victim)
            if victim.device is not None:
                self._tree.drop_host(victim)
            else:
                self._tree.detach(victim)
        return count
