"""Tiering: makes room in a tier, decides the copies between the tiers by the policies, and collects them in a step."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from ..contract.messages import (
    SWAP_IN,
    SWAP_OUT,
    BlockCopies,
    CacheLevel,
    CopyKind,
    CopyResult,
    DeviceSlot,
    HostSlot,
    NoSpace,
    SwapStep,
)
from ..errors import PoolInUseError
from .cache_stats import Counters
from .copies_by_step import CopiesByStep
from .lookahead import Lookahead
from .policies.backup import BackupPolicy
from .radix_tree import RadixTree
from .residency import Residency
from .run import DEVICE, Run
from .traffic.evicted_pieces import COPY_FAILED


class Tiering:
    def __init__(
        self, policy: BackupPolicy, tree: RadixTree, residency: Residency, lookahead: Lookahead, counters: Counters
    ) -> None:
        self._policy = policy
        self._tree = tree
        self._residency = residency
        self._lookahead = lookahead
        self._counters = counters
        self.step = 0
        """Number of the open step, whose copies are being decided."""
        self.told = CopiesByStep()
        self.refilled: dict[HostSlot, None] = {}
        """Host slots that loads have filled since the last step with copies."""
        self._evicted_before = 0
        """Value of `device_evicted_blocks` when the last step was taken."""

    # ---- device slots

    @property
    def num_available_device(self) -> int:
        """Device slots that `allocate_device` can hand out."""
        pool = self._residency.device_pool
        # Evicting a cached block makes no room while a store holds its slot.
        return pool.num_free + max(0, self._residency.num_device_evictable - pool.num_held)

    @property
    def num_evictable(self) -> int:
        """Blocks not in use that the tiers can hold. Host copies of blocks in use count too."""
        device, host = self.num_available_device, self._residency.host_pool.size
        return device + host if self._residency.host_duplicates.are_wanted else max(device, host)

    def allocate_device(self, count: int) -> list[DeviceSlot] | NoSpace:
        """Take `count` slots, evicting cached blocks to make room. `NoSpace` changes nothing."""
        pool = self._residency.device_pool
        if count <= pool.num_free:
            return pool.allocate(count)
        if count > self.num_available_device:
            self._counters.allocations_refused += 1
            return NoSpace(count, self.num_available_device)
        self._lookahead.look()
        while (short := count - pool.num_free) > 0:
            victim = self._residency.next_device_victim()
            assert victim is not None, "blocks counted as evictable can be evicted"
            self._evict_device(victim, short)
        return pool.allocate(count)

    def swap_in(self, path: Sequence[Run], slots: Sequence[DeviceSlot]) -> None:
        """Open a swap-in into `slots` for the runs of the pinned `path` that are not on the device."""
        used = 0
        for run in path:
            if not run.on_device:
                self._residency.start_swap_in(run, slots[used : used + run.length])
                used += run.length
        assert used == len(slots), "one slot per block"

    # ---- slots of either tier for blocks from outside

    def allocate_up_to(self, count: int, level: CacheLevel) -> list[Any]:
        """Take `count` slots, or as many as there is room for, evicting cached blocks."""
        if level is CacheLevel.HOST:
            return self._residency.host_pool.allocate(self._make_host_room(count))
        slots = self.allocate_device(min(count, self.num_available_device))
        assert not isinstance(slots, NoSpace), "what is available can be allocated"
        return slots

    def free(self, slots: Sequence[Any], level: CacheLevel) -> None:
        """Free slots of tier `level` that the tree does not own."""
        (self._residency.host_pool if level is CacheLevel.HOST else self._residency.device_pool).free(slots)

    # ---- backups

    def hit(self, leaf: Run) -> None:
        """Count one more hit of the pinned path to `leaf`, which is on the device, and back it up by the policy."""
        after = self._policy.copied_after_hits
        if after is None:
            return
        run = leaf
        while run.parent is not None and run.hits < after:  # runs above have at least as many hits
            run.hits += 1
            run = run.parent
        self._counters.backup_skipped_blocks += self._back_up([run for run in leaf.path() if run.hits >= after])

    def back_up_completed(self, runs: Sequence[Run], num_new: int) -> None:
        """Back up `runs`, whose last `num_new` blocks have just been computed, if the policy copies new blocks."""
        if self._policy.copied_after_hits == 0:
            skipped = self._back_up(runs)
            self._counters.backup_skipped_blocks += min(skipped, num_new)  # older blocks were counted before

    # ---- the step

    def last_step_with_copies(self, level: CacheLevel) -> int:
        """Return the number of the last step whose copies may use slots of tier `level` that are free now.

        Open copies can read free device slots, but never use free host slots.
        """
        is_read = level is CacheLevel.DEVICE and bool(self._residency.open_copies(CacheLevel.HOST))
        return self.step if is_read else self.step - 1

    def take_step(self) -> SwapStep:
        """Hand over the copies decided since the last call. They count as done from now on: the worker keeps order."""
        step, self.step = self.step, self.step + 1  # blocks that this step computes can be committed from now on
        self._back_up_ahead()
        self._lookahead.expect(())  # waiting requests must be named anew for each step
        evicted, read = self._residency.open_copies(CacheLevel.HOST), self._residency.open_copies(CacheLevel.DEVICE)
        copied = evicted + read
        if not copied:
            return SwapStep(step)
        transfers = [_copies(kind, runs) for kind, runs in ((SWAP_OUT, evicted), (SWAP_IN, read)) if runs]
        self._counters.swap_out_blocks += sum([run.length for run in evicted])
        self._counters.swap_in_blocks += sum([run.length for run in read])
        self.told.remember(step, copied)
        self._residency.close_copies()
        # With the first copies after the load: one that fills the slot later and fails must not count as repaired.
        refilled, self.refilled = tuple(self.refilled), {}
        return SwapStep(step, tuple(transfers), refilled)

    # ---- administration

    def evict_above(self, size: int) -> None:
        """Evict cached blocks in device slots `size` and above, and blocks below them, without copies. O(cache).

        Raises `PoolInUseError` as `CacheManager.resize_device_pool` does.
        """
        pool = self._residency.device_pool
        above = {slot for slot in pool.owned_slots() if slot >= size}
        hit = [run for run in self._tree.runs() if not above.isdisjoint(run.device_slots)]
        evictable = {slot for run in hit if not run.pins for slot in run.device_slots}
        outgoing = self._residency.open_copies(CacheLevel.HOST)
        to_copy = {slot for run in outgoing for slot in run.slots(DEVICE, run.start, run.end) if slot >= size}
        read = {slot for slot in pool.held_slots() if slot >= size}
        in_use = (above - evictable) | to_copy | read
        if in_use:
            raise PoolInUseError(
                f"cannot shrink the device pool to {size} blocks: {len(in_use)} blocks above are in use; "
                "finish or preempt their requests, and complete their loads and stores, first"
            )
        for run in hit:
            if run.on_device:  # else it has left with an earlier run
                self._cut_before(run, run.device_slots, above)
                for victim in reversed([below for below in run.subtree() if below.on_device]):
                    self._drop_device(victim)

    def forget_failed(self, result: CopyResult) -> set[Run]:
        """Forget the content of the slots that `result` failed to fill, and blocks below it that are in no other tier.

        Returns the runs that can no longer be found; some may be in use. Costs as `CacheManager.transfer_failed`.
        """
        failed = frozenset(result.target_slots)
        told = self.told.of(result.step)
        findable = self._tree.runs() if told is None else (run for copy in told for run, _, _ in copy.parts())
        lost: set[Run] = set()
        for run in dict.fromkeys([*findable, *self._residency.detached_runs()]):
            if run in lost:
                continue
            if result.target is CacheLevel.DEVICE:
                lost.update(self._lose(run, run.device_slots, failed))
            elif not run.on_device or run.open is CacheLevel.DEVICE:
                lost.update(self._lose(run, run.host_slots, failed))
            elif run.open is None and not run.detached and not failed.isdisjoint(run.host_slots):
                self._residency.drop_host(run)
        return lost

    # ---- inside

    def _lose(self, run: Run, slots: Sequence[int], failed: Set[int]) -> list[Run]:
        """Forget `run` from its first slot in `failed` on. Returns the runs that are gone."""
        if failed.isdisjoint(slots):
            return []
        if run.detached:
            return list(run.subtree())
        self._cut_before(run, slots, failed)
        return self._tree.detach(run, COPY_FAILED)

    def _cut_before(self, run: Run, slots: Sequence[int], marked: Set[int]) -> None:
        """Cut `run` so that it begins with the first of its `slots` that is in `marked`."""
        first = next(index for index, slot in enumerate(slots) if slot in marked)
        self._tree.tail(run, run.length - first)

    def _evict_device(self, run: Run, most: int) -> None:
        """Evict the last blocks of `run`, at most `most`, after copying them to the host if the policy saves them."""
        count = min(most, run.length)
        if run.host is None and self._residency.host_pool.size and self._policy.saves_at_eviction:
            if self._is_declined(run, count):
                self._counters.backup_declined_blocks += count
            else:  # with room for a part only, the upper part is saved, stays on the device and is the next victim
                self._counters.backup_skipped_blocks += self._back_up([self._tree.tail(run, count)])
        if count < run.length and run.host is None and not run.children and run.ends_its_cells:
            self._counters.device_evicted_blocks += count
            self._counters.device_lost_blocks += count
            self._residency.drop_last(run, count)  # cheaper than making a run of the blocks that stay
        else:
            self._drop_device(self._tree.tail(run, count))

    def _is_declined(self, run: Run, count: int) -> bool:
        """True if `run` never returns, or is worth less than the run that would have to leave the host for `count`
        blocks of it.
        """
        order = self._residency.host_order
        if not self._policy.weighs or order.never_returns(run):
            return self._policy.weighs
        if count <= self._residency.host_pool.num_free:
            return False
        victim = self._residency.next_host_victim(is_lost=True)
        return victim is not None and order.worth(run) < order.worth(victim)

    def _drop_device(self, run: Run) -> None:
        if run.open is not CacheLevel.DEVICE:  # else no request waits for its swap-in any more
            self._counters.device_evicted_blocks += run.length
        if run.host is not None:
            self._residency.drop_device(run)
            return
        self._counters.device_lost_blocks += run.length
        lost = self._tree.detach(run)
        self._counters.host_evicted_blocks += sum(below.length for below in lost[1:])  # unreachable without `run`

    def _back_up_ahead(self) -> None:
        """Back up the blocks that will have to leave the device next."""
        device, host = self._residency.device_pool, self._residency.host_pool
        num_evicted = self._counters.device_evicted_blocks
        ahead = self._policy.blocks_ahead(num_evicted - self._evicted_before, device.size, host.size)
        self._evicted_before = num_evicted
        ahead -= device.num_free
        if ahead <= 0 or not host.size:
            return
        self._lookahead.look()  # before the walk, because it moves places of that order
        for run in self._residency.next_to_leave():
            if run.host is None and not self._is_declined(run, run.length):
                self._back_up([self._tree.tail(run, ahead)])
            ahead -= run.length
            if ahead <= 0:
                return

    def _back_up(self, runs: Sequence[Run]) -> int:
        """Open swap-outs of `runs`, in prompt order. Returns how many blocks found no room; 0 without a host tier."""
        skipped = 0
        for run in runs:
            if run.host is None:
                room = self._make_host_room(run.length)
                skipped += run.length - room
                if room:
                    saved = run if room == run.length else self._tree.split(run, room)
                    self._residency.start_swap_out(saved, self._residency.host_pool.allocate(room))
        return skipped if self._residency.host_pool.size else 0

    def _make_host_room(self, count: int) -> int:
        """Evict from the host to free `count` slots. Returns how many are free, fewer if no eviction makes room."""
        pool = self._residency.host_pool
        if count > pool.num_free:
            self._lookahead.look()
        while (short := count - pool.num_free) > 0:
            victim = self._residency.next_host_victim()
            if victim is None:
                return pool.num_free
            self._tree.tail(victim, self._residency.num_loose(victim, short))
            self._counters.host_evicted_blocks += victim.length
            if victim.on_device:
                self._residency.drop_host(victim)
            else:
                self._tree.detach(victim)
        return count


def _copies(kind: CopyKind, runs: Sequence[Run]) -> BlockCopies:
    on_device: list[int] = []
    on_host: list[int] = []
    for run in runs:
        on_device += run.slots(DEVICE, run.start, run.end)
        on_host += run.host_slots
    sources, targets = (on_device, on_host) if kind is SWAP_OUT else (on_host, on_device)
    return BlockCopies(*kind, tuple(sources), tuple(targets))
