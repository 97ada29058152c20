"""CacheManager: the scheduler half. It decides which block is where; the worker half moves the bytes.

A request's life: `match_prefix` -> `allocate` (again and again while it grows) -> `commit` (what has been computed is
now matchable) -> `finish`, or `preempt`, or `release` when it was not scheduled after all. Once per scheduling step
`take_swap_step` hands over every copy decided since the last one; the worker runs its evictions, then its swap-ins,
then the forward pass. That order is why an evicted device slot may be used again at once, and why a host slot that an
open copy reads or fills may not: its run stays pinned, or open, until the step is taken.

Every public method takes one lock and is atomic. Unless it says otherwise it costs O(blocks it adds + runs of the
request's prefix), independent of the cache's size and of the length of the prefix: blocks cached together are one run,
and a conversation of any number of turns is a few (see `run.py`).
"""

from __future__ import annotations

import operator
import secrets
import threading
from collections.abc import Container, Sequence, Set
from dataclasses import replace

from ..config import KVCacheConfig
from ..contract.messages import (
    Allocation,
    BlockHash,
    BlockHashes,
    CacheEvent,
    CacheLevel,
    CopyResult,
    DeviceSlot,
    HostSlot,
    LoadSlots,
    MatchResult,
    NoSpace,
    StoreSource,
    SwapStep,
)
from ..errors import BlockPoolError, CacheStateError, ConfigError
from .block_pool import BlockPool
from .cache_stats import CacheStats, Counters
from .copies_by_step import CopiesByStep
from .event_log import EventLog
from .invariants import expect
from .loans import Loads, Stores
from .lookahead import Lookahead
from .policies.backup import BACKUP_POLICIES
from .policies.eviction import eviction_order
from .policies.host_duplicates import HostDuplicates
from .radix_tree import RadixTree
from .request_table import RequestTable
from .residency import Residency
from .reuse.history import ReuseHistory
from .run import DEVICE, HOST
from .snapshot import CacheSnapshot, count, describe, look
from .tiering import Tiering

__all__ = ["CacheManager"]

SWEPT_PER_STEP = 512
"""Forgotten runs that a step takes apart after a reset, some 0.3 ms of work."""

LEAST_WATCHED = 8192
MOST_WATCHED = 131_072


class CacheManager:
    """See the module's text. Thread-safe."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self._lock = threading.RLock()
        self._counters = Counters()
        self._events = EventLog(config.max_queued_events)
        self._device_pool = BlockPool[DeviceSlot]("device", config.num_device_blocks)
        self._host_pool = BlockPool[HostSlot]("host", config.num_host_blocks)
        self._history = ReuseHistory(self._most_watched, lambda: self._tiering.num_evictable)
        backup = BACKUP_POLICIES[config.write_policy](config)
        self._residency = Residency(
            self._device_pool,
            self._host_pool,
            eviction_order(config.device_order, self._history),
            eviction_order(config.host_order, self._history),
            HostDuplicates(self._device_pool, self._host_pool, are_saved=backup.saves_at_eviction),
            self._events,
        )
        self._tree = RadixTree(self._residency)
        self._lookahead = Lookahead(self._tree, self._residency, config.lookahead_requests)
        self._tiering = Tiering(backup, self._tree, self._residency, self._lookahead, self._counters)
        orders = [self._residency.device_order, *([self._residency.host_order] if config.num_host_blocks else [])]
        learner = self._history if any(order.learns for order in orders) else None
        self._requests = RequestTable(config, self._tree, self._tiering, self._counters, learner)
        self._lent: set[DeviceSlot] = set()
        self._loads = Loads(config, self._tree, self._tiering, self._counters)
        self._stores = Stores(self._tree, self._residency, self._tiering)
        self._names_key = secrets.token_bytes(16)

    # ---- the life of a request

    def match_prefix(
        self, request_id: str, sequence: BlockHashes, *, max_blocks: int | None = None, resumed: bool = False
    ) -> MatchResult:
        """Find and pin the longest cached prefix of `sequence`, at most all blocks before its last token (and, when
        given, at most `max_blocks`). Nothing for a sequence whose `access` does not read.

        The manager keeps `sequence` and reads its growing hashes in `commit`. `resumed` says that the request computed
        before and was preempted: what it finds is its own work, is counted apart and is no reason for a backup.
        Raises `CacheStateError` if the request is already known: release, preempt or finish it first.
        """
        with self._lock:
            return self._requests.match(request_id, sequence, max_blocks, resumed=resumed)

    def allocate(self, request_id: str, num_tokens: int) -> Allocation | NoSpace:
        """Grow the request's block table to hold `num_tokens` tokens. Atomic: `NoSpace` changes nothing.

        The first call admits the request: matched blocks on the host get device slots, and their swap-in is planned.
        Raises `UnknownRequestError`, or `CacheStateError` if `num_tokens` does not cover the matched prefix.
        """
        with self._lock:
            return self._requests.allocate(request_id, num_tokens)

    def commit(self, request_id: str, num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens matchable.

        Nothing happens for a sequence whose `access` does not write. Their KV must have been written, or be ordered on
        the compute stream before every later reader. The newest token of the sequence is never counted: a sampled token
        has no KV yet. Idempotent; fewer tokens than before are ignored. Raises `UnknownRequestError`, or
        `CacheStateError` for tokens without a block, blocks without a hash, or tokens that cannot have been computed
        because the step that allocated them has not been taken.
        """
        with self._lock:
            self._requests.commit(request_id, num_computed_tokens)

    def uncommitted(self, request_id: str, num_computed_tokens: int) -> Sequence[BlockHash]:
        """Names of the blocks that `commit` will make matchable once the request's first `num_computed_tokens` tokens
        are computed: none if it does not write, or the cache was reset or lost what they stand on. Raises
        `UnknownRequestError`.
        """
        with self._lock:
            return self._requests.uncommitted(request_id, num_computed_tokens)

    def finish(self, request_id: str) -> None:
        """The request is done (or aborted): its committed blocks stay cached, everything else is free again.

        Raises `UnknownRequestError`, freeing nothing, when it was finished before.
        """
        with self._lock:
            self._requests.end(request_id)
            self._counters.requests_finished += 1

    def preempt(self, request_id: str) -> None:
        """Take everything from a running request; it resumes by a new match. Raises `UnknownRequestError`."""
        with self._lock:
            self._requests.end(request_id)
            self._counters.requests_preempted += 1

    def release(self, request_id: str) -> None:
        """Undo the match (and allocation) of a request that was not scheduled: pins and LRU order as before.

        Only blocks that an eviction had to pass over meanwhile are the most recently used ones now. Swap-ins planned
        for it alone are cancelled, unless blocks below them are on the device. Once the step of the allocation has been
        taken it counts as served, and its blocks as used. Raises `UnknownRequestError`, or `CacheStateError` if it has
        committed blocks: finish or preempt it then.
        """
        with self._lock:
            self._requests.roll_back(request_id)

    def count_shared_prefill(self, num_tokens: int) -> None:
        """A request is admitted that waited for another one's prefix, and found `num_tokens` tokens more by that."""
        with self._lock:
            self._counters.shared_prefill_requests += 1
            self._counters.shared_prefill_tokens += num_tokens

    def expect(self, line: Sequence[BlockHashes]) -> None:
        """Requests that wait to be matched, the next one first: what they would hit now leaves its tier last.

        Tell it before each scheduling step; only the first `KVCacheConfig.lookahead_requests` are looked at. It is kept
        as a hint: requests may come, go, and pass each other as they like. O(1), and O(runs of these prefixes) once in
        a step that evicts.
        """
        with self._lock:
            self._lookahead.expect(line)

    # ---- slots of a scheduler that keeps its own block tables

    def lend(self, count: int) -> list[DeviceSlot] | NoSpace:
        """`count` device slots for the caller to own, outside any block table. Atomic: `NoSpace` changes nothing."""
        with self._lock:
            slots = self._tiering.allocate_device(count)
            if not isinstance(slots, NoSpace):
                self._lent.update(slots)
            return slots

    def take_back(self, slots: Sequence[DeviceSlot]) -> None:
        """The caller owns `slots` no longer. Raises `BlockPoolError`, changing nothing, if one of them is not lent."""
        with self._lock:
            self._end_loan(slots)
            self._device_pool.free(slots)

    def adopt(self, request_id: str, slots: Sequence[DeviceSlot]) -> None:
        """Lent `slots` become the next entries of an admitted request's block table, to be committed and given back
        with it. Raises `BlockPoolError`, changing nothing, if one of them is not lent.
        """
        with self._lock:
            request = self._requests[request_id]
            if not request.admitted:
                raise CacheStateError(f"request {request_id} has no block table yet: allocate first")
            self._end_loan(slots)
            request.adopt(slots, self.config.block_size)

    def _end_loan(self, slots: Sequence[DeviceSlot]) -> None:
        named = set(slots)
        if wrong := named - self._lent:
            raise BlockPoolError(f"slots {sorted(wrong)} are not lent: name slots that `lend` returned")
        if len(named) != len(slots):
            raise BlockPoolError(f"a lent slot was named twice: {sorted(slots)[:8]}")
        self._lent -= named

    def lent_slots(self) -> frozenset[DeviceSlot]:
        """Every slot the caller of `lend` owns; O(lent), for checks."""
        with self._lock:
            return frozenset(self._lent)

    # ---- blocks from outside the two tiers

    def begin_load(
        self,
        load_id: str,
        hashes: Sequence[BlockHash],
        first: int,
        *,
        level: CacheLevel = CacheLevel.HOST,
        most: int | None = None,
    ) -> LoadSlots | NoSpace:
        """Lend slots of tier `level` for blocks `hashes[first:]` of a prompt, at most for `most` of them, which storage
        or a peer is going to fill.

        `hashes` begin with the prompt's first block; they are kept, and may only grow meanwhile. Cached blocks are
        evicted where slots are short, and there may be fewer slots than blocks: then the load is of the first ones.
        `NoSpace`, changing nothing, if there is none, or prefix caching is off. Read `LoadSlots.after_step` before
        letting bytes in.

        Until `complete_load` nothing of it can be matched, and no other owner gets its slots. A load pins nothing: to
        keep the blocks before `first`, let a request match them. Raises `CacheStateError` if `load_id` has begun
        already or there is no such block. O(slots).
        """
        with self._lock:
            return self._loads.begin(load_id, hashes, first, level, most)

    def complete_load(self, load_id: str, num_arrived: int) -> int:
        """The first `num_arrived` blocks of a load are there, and no byte can arrive in any of its slots any more.

        They become ordinary cached blocks, and all other slots are free again. Returns how many became cached, the last
        ones of those that arrived: blocks that are cached already do not, nor any if the load was cancelled or the
        blocks before it are gone (for the device tier: are not on the device). 0 arrived aborts a load.
        Raises `CacheStateError`, changing nothing, for an unknown load or more blocks than it has slots. O(blocks).
        """
        with self._lock:
            return self._loads.complete(load_id, num_arrived)

    def cancel_load(self, load_id: str) -> None:
        """Nothing of the load is wanted any more, but bytes may still arrive: quarantine. Its slots are kept until
        `complete_load`, however long that takes. Idempotent. Raises `CacheStateError` for an unknown load.
        """
        with self._lock:
            self._loads.cancel(load_id)

    def begin_store(self, store_id: str, step: int, slots: Set[int]) -> StoreSource:
        """Keep the bytes of the blocks that `step` copied into host `slots`, until `end_store`: storage or a peer reads
        them. The copy must have been reported as done, and no later step have been told to fill one of `slots`.

        Blocks that left the host meanwhile are not in the result, nor any if that step was too long ago: without blocks
        nothing has begun. Nothing is pinned: what is forgotten meanwhile frees its slots when the store ends, and
        what would leave the host to make room stays until then.
        Raises `CacheStateError` if `store_id` has begun already. O(blocks named, and runs above them).
        """
        with self._lock:
            return self._stores.begin(store_id, step, slots)

    def begin_device_store(
        self, store_id: str, hashes: Sequence[BlockHash], first: int, *, most: int | None = None
    ) -> StoreSource:
        """Keep the device slots of blocks `hashes[first:]` of a prompt, at most of `most` of them, as they are, until
        `end_store`: storage reads them. `hashes` begin with the prompt's first block.

        Blocks from the first one on that is not on the device are not in the result; without blocks nothing has begun.
        The bytes are there once the worker has ended every copy and pass of the steps it was told of, unless such a
        copy fails. Nothing is pinned: blocks may leave the device meanwhile, their slots are free when the store ends.
        Raises `CacheStateError` if `store_id` has begun already. O(blocks).
        """
        with self._lock:
            return self._stores.begin_on_device(store_id, hashes, first, most)

    def end_store(self, store_id: str) -> None:
        """Nobody reads for this store any more. Raises `CacheStateError` for one that is unknown: it had no blocks, or
        has ended already.
        """
        with self._lock:
            self._stores.end(store_id)

    # ---- the worker

    def take_swap_step(self) -> SwapStep:
        """Every copy decided since the last call. Steps are numbered without gaps and reach the worker in order.

        Requests admitted since then count as hits now; what the policy backs up for them leaves with this step.
        """
        with self._lock:
            self._tree.sweep(SWEPT_PER_STEP)
            self._requests.count_admitted()
            return self._tiering.take_step()

    @property
    def has_open_copies(self) -> bool:
        """Copies are decided that no step has handed over: blocks that one brings to another tier are in none yet."""
        with self._lock:
            return any(self._residency.open_copies(level) for level in CacheLevel)

    def transfer_failed(self, result: CopyResult) -> list[str]:
        """A copy failed in the worker: its targets hold garbage and are forgotten, with every block below them.

        Returns the running requests that use such a block: preempt and recompute them. Tell of a failure before
        committing what was computed on top of such a block. O(requests + blocks copied in
        that step), but O(cache) for a step of long ago, see `copies_by_step.py`.
        """
        if not result.target_slots:
            return []
        with self._lock:
            self._counters.failed_transfer_blocks += len(result.target_slots)
            return self._requests.drop_lost(self._tiering.forget_failed(result))

    # ---- administration

    def reset_cache(self, *, force: bool = False) -> None:
        """Forget every cached block of both tiers.

        Running requests keep their blocks until they end and cache nothing more. With `force` they are forgotten too,
        all slots, lent ones included, are free, and copies not yet taken are dropped: the caller has stopped the
        worker's use of them. Either way loads are cancelled, see `cancel_load`: their slots stay reserved, and so do
        the slots that a store reads, until it ends. O(requests + blocks in use), and a copy of the pools' lists;
        what was forgotten is taken apart little by little, by later steps.
        """
        with self._lock:
            if force:
                self._requests.end_all()
                self._lent.clear()
            self._loads.cancel_all()
            in_use = self._requests.forget_matches()
            self._history.forget()
            self._tree.detach_all(in_use, self._device_slots_outside(), self._loads.slots(CacheLevel.HOST))
            self._tiering.told = CopiesByStep()
            if force:
                self._residency.close_copies()

    def resize_device_pool(self, num_device_blocks: int) -> None:
        """Grow, or shrink: cached blocks above the new end are evicted (their host copies stay).

        Raises `ConfigError` for a size below 1, and `PoolInUseError`, with no change, when a request, a load or a store
        uses a slot above the new end or such a slot still waits to be copied out. O(cache).
        """
        size = operator.index(num_device_blocks)
        if size < 1:
            raise ConfigError(f"the device pool needs at least 1 block, got {size}")
        with self._lock:
            self._tiering.evict_above(size)
            self._device_pool.resize(size)

    def take_events(self) -> list[CacheEvent]:
        """What was stored in and removed from each tier since the last call, in order.

        The first call subscribes: until then events cost nothing. Its list, as every one after more than
        `max_queued_events` piled up, starts with `cleared` and describes the whole cache; O(cache) then. With
        `max_queued_events` 0 there are no events.
        """
        with self._lock:
            return self._events.take(self._tree.runs())

    # ---- looking

    def count_cached(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first blocks of a prompt are cached, in any tier. A look: nothing is pinned or counted."""
        with self._lock:
            return sum(count for _, count in self._tree.look(hashes))

    def count_on_device(self, hashes: Sequence[BlockHash]) -> int:
        """As `count_cached`, of the blocks on the device: those that follow them may be cached on the host."""
        with self._lock:
            return sum(count for run, count in self._tree.look(hashes) if run.on_device)

    def num_cached(self, request_id: str) -> int:
        """How many blocks at the start of the request's table are cached ones. Raises `UnknownRequestError`."""
        with self._lock:
            return self._requests[request_id].num_cached

    def num_blocks(self, request_id: str) -> int:
        """Length of the request's block table; 0 before it is admitted. Raises `UnknownRequestError`."""
        with self._lock:
            return self._requests[request_id].num_blocks

    def block_table(self, request_id: str) -> list[DeviceSlot]:
        """The request's block table, device slots in prompt order: a new list. O(its blocks). Raises
        `UnknownRequestError`.
        """
        with self._lock:
            return self._requests[request_id].block_table()

    @property
    def num_device_blocks(self) -> int:
        with self._lock:
            return self._device_pool.size

    @property
    def num_free_device_blocks(self) -> int:
        """Device slots that are free; cached blocks are not."""
        with self._lock:
            return self._device_pool.num_free

    @property
    def num_available_device_blocks(self) -> int:
        """Device slots an `allocate` could get now: free ones and evictable ones."""
        with self._lock:
            return self._tiering.num_available_device

    def stats(self) -> CacheStats:
        """O(requests and loads)."""
        with self._lock:
            loading, on_host = map(self._loads.num_slots, (CacheLevel.DEVICE, CacheLevel.HOST))
            return CacheStats(
                counters=replace(self._counters),
                num_requests=len(self._requests),
                device_blocks=self._device_pool.size,
                device_free_blocks=self._device_pool.num_free,
                device_cached_blocks=self._device_pool.num_owned - self._num_device_slots_outside(),
                device_evictable_blocks=self._residency.num_device_evictable,
                host_blocks=self._host_pool.size,
                host_free_blocks=self._host_pool.num_free,
                host_cached_blocks=self._host_pool.num_owned - on_host,
                device_loading_blocks=loading,
                host_loading_blocks=on_host,
                quarantined_blocks=self._loads.num_quarantined,
                watched_blocks=len(self._history),
                recency_rules=not self._history.judge.trusts,
                events_overflowed=self._events.overflows,
            )

    def snapshot(self, most_blocks: int = 1024, *, stored: Container[BlockHash] = ()) -> CacheSnapshot:
        """Describe which runs are in which tier. Lists runs of `most_blocks` blocks, at most 2,048 (`MOST_BLOCKS`), and
        counts the cached blocks left out. `stored` has the blocks known to be in storage.

        Holds the lock for O(`most_blocks` + requests + loads), some 2 ms at most, whatever the size of the cache. The
        snapshot has no block hash, request id, token or tenant; its counts tell how much of the cache is in use.
        """
        with self._lock:
            runs = look(self._tree.root, self._residency.detached_runs(), most_blocks)
            on_device, on_host = (sum(len(run.slots(tier)) for run in runs) for tier in (DEVICE, HOST))
            device = count(self._device_pool, self._num_device_slots_outside(), on_device)
            host = count(self._host_pool, self._loads.num_slots(CacheLevel.HOST), on_host)
            num_requests = len(self._requests)
        listed = describe(runs, self._names_key, stored)
        return CacheSnapshot(self.config.block_size, num_requests, device, host, listed)

    def check(self) -> None:
        """Raises `InvariantError` unless every slot has exactly one owner and every pin a request; O(cache)."""
        with self._lock:
            self._residency.check(self._tree.runs())
            runs = [*self._tree.runs(), *self._residency.detached_runs()]
            cached = [slot for run in runs for slot in run.device_slots]
            self._device_pool.check_owners([*cached, *self._device_slots_outside()])
            on_host = [slot for run in runs for slot in run.host_slots]
            self._host_pool.check_owners([*on_host, *self._loads.slots(CacheLevel.HOST)])
            self._requests.check(runs)
            self._stores.check()

    def check_idle(self) -> None:
        """`check`, and every allocated slot is cached and evictable: no request, loan, load or store holds one."""
        with self._lock:
            self.check()
            self._requests.check_none()
            self._loads.check_none()
            self._stores.check_none()
            expect(
                not self._residency.detached_runs(),
                "manager: forgotten blocks still hold slots; take the swap step first",
            )
            expect(self._tiering.num_available_device == self._device_pool.size, "manager: device slots leaked")

    def _most_watched(self) -> int:
        """Blocks that `ReuseHistory` may watch now, of some 300 bytes: of at least twice as many prompts as the cache
        holds, up to some 40 MB.
        """
        num_blocks = self._device_pool.size + self._host_pool.size
        return max(LEAST_WATCHED, min(2 * num_blocks, MOST_WATCHED))

    def _device_slots_outside(self) -> list[DeviceSlot]:
        """Every allocated device slot that is not the tree's."""
        return [*self._requests.own_slots(), *self._lent, *self._loads.slots(CacheLevel.DEVICE)]

    def _num_device_slots_outside(self) -> int:
        """O(requests and loads)."""
        return self._requests.num_own_slots + len(self._lent) + self._loads.num_slots(CacheLevel.DEVICE)
