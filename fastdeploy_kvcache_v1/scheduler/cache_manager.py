"""CacheManager: the scheduler half. It decides which block is in which tier; the worker half copies the bytes.

A *block* is the KV of `block_size` consecutive tokens, named by a hash of the whole prefix up to its last token. Two
tiers hold blocks in *slots*: the device (GPU memory) and, below it, the host (CPU memory).

A request calls `match_prefix`, `allocate` (again whenever it grows) and `commit` (its computed blocks can be matched
now). It ends with `finish` or `preempt`, or with `release` if it was not scheduled after all.

Once per scheduling step `take_swap_step` hands over the copies decided since the previous step. The worker runs the
swap-outs, then the swap-ins, then the forward pass. So a device slot can be reused at once after an eviction. A host
slot that an open copy reads or fills cannot: its run stays pinned or open until the step is taken.

Every public method takes one lock and is atomic. Unless its docstring says otherwise, it costs O(blocks added + runs of
the request's prefix), independent of the size of the cache. Blocks cached together form one run, see `run.py`.
"""

from __future__ import annotations

import operator
import secrets
import threading
import time
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import replace

from ..config import KVCacheConfig
from ..contract.cache_report import MOST_LISTED, CacheReport
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
from ..contract.misses import Miss, MissReason, StoredPrefix
from ..contract.sessions import SessionHint
from ..errors import BlockPoolError, CacheStateError, ConfigError
from ..telemetry.metrics import Parts, samples_of
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
from .traffic.evicted_pieces import EvictedPieces
from .traffic.log import Traffic, TrafficLog, row_of
from .traffic.misses import Misses

__all__ = ["CacheManager"]

SWEPT_PER_STEP = 512
"""Runs that one step frees after a reset: about 0.3 ms."""

LEAST_WATCHED = 1 << 16
MOST_WATCHED = 131_072


class CacheManager:
    """The prefix cache of one server: both tiers, its requests, and the copies between the tiers. Thread-safe."""

    def __init__(
        self, config: KVCacheConfig, clock: Callable[[], float] = time.monotonic, *, logs_traffic: bool = True
    ) -> None:
        """`clock` returns seconds from 0 up and never runs back. `logs_traffic`: `traffic` is going to be called."""
        self.config = config
        self._lock = threading.RLock()
        self._counters = Counters()
        self._events = EventLog(config.max_queued_events)
        self._device_pool = BlockPool[DeviceSlot]("device", config.num_device_blocks)
        self._host_pool = BlockPool[HostSlot]("host", config.num_host_blocks)
        self._history = ReuseHistory(
            clock, self._counters, self._most_watched, lambda: self._tiering.num_evictable, config.block_size
        )
        self._pieces = EvictedPieces(clock, config.num_device_blocks + config.num_host_blocks)
        backup = BACKUP_POLICIES[config.write_policy](config)
        self._residency = Residency(
            self._device_pool,
            self._host_pool,
            eviction_order(config.device_order, self._history),
            eviction_order(config.host_order, self._history),
            HostDuplicates(self._device_pool, self._host_pool, are_saved=backup.saves_at_eviction),
            self._events,
            self._pieces,
        )
        self._tree = RadixTree(self._residency)
        self._lookahead = Lookahead(self._tree, self._residency, config.lookahead_requests)
        self._tiering = Tiering(backup, self._tree, self._residency, self._lookahead, self._counters)
        orders = [self._residency.device_order, *([self._residency.host_order] if config.num_host_blocks else [])]
        learner = self._history if any(order.learns for order in orders) else None
        self.misses = Misses(config.block_size, self._pieces, self._tree, clock)
        self._log = TrafficLog(clock, config.block_size, config.num_device_blocks + config.num_host_blocks)
        self._requests = RequestTable(
            config, self._tree, self._tiering, self._counters, learner, self.misses, self._log if logs_traffic else None
        )
        self._lent: set[DeviceSlot] = set()
        self._loads = Loads(config, self._tree, self._tiering, self._counters)
        self._stores = Stores(self._tree, self._residency, self._tiering)
        self._names_key = secrets.token_bytes(16)
        self._name = secrets.token_hex(4)

    # ---- the life of a request

    def match_prefix(
        self, request_id: str, sequence: BlockHashes, *, max_blocks: int | None = None, resumed: bool = False
    ) -> MatchResult:
        """Find and pin the longest cached prefix of `sequence`: at most `max_blocks` blocks, never its last token.

        Finds nothing if `sequence.access` does not read. The manager keeps `sequence`; `commit` reads its growing
        hashes. `resumed`: the request was preempted before, so its hits are its own work. They are counted apart and
        cause no backup. Raises `CacheStateError` if the request is known already: release, preempt or finish it first.
        """
        with self._lock:
            return self._requests.match(request_id, sequence, max_blocks, resumed=resumed)

    def allocate(self, request_id: str, num_tokens: int) -> Allocation | NoSpace:
        """Grow the request's block table to hold `num_tokens` tokens. Atomic: `NoSpace` changes nothing.

        The first call admits the request: its matched blocks on the host get device slots and a planned swap-in.
        Raises `UnknownRequestError`, or `CacheStateError` if `num_tokens` does not cover the matched prefix.
        """
        with self._lock:
            return self._requests.allocate(request_id, num_tokens)

    def commit(self, request_id: str, num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens matchable.

        Their KV must be written, or ordered on the compute stream before every later reader. The newest token of the
        sequence never counts: a sampled token has no KV yet. Idempotent; fewer tokens than before are ignored. Does
        nothing if the sequence's `access` does not write.
        Raises `UnknownRequestError`. Raises `CacheStateError` for tokens without a block, for blocks without a hash,
        and for tokens allocated in a step that has not been taken: they cannot have been computed.
        """
        with self._lock:
            self._requests.commit(request_id, num_computed_tokens)

    def uncommitted(self, request_id: str, num_computed_tokens: int) -> Sequence[BlockHash]:
        """Return the hashes of the blocks that `commit(request_id, num_computed_tokens)` would make matchable.

        Empty if the request does not write, or if a reset or a failed copy removed its prefix. Raises
        `UnknownRequestError`.
        """
        with self._lock:
            return self._requests.uncommitted(request_id, num_computed_tokens)

    def finish(self, request_id: str) -> None:
        """End a request that is done or aborted: its committed blocks stay cached, its other slots are freed.

        Raises `UnknownRequestError`, freeing nothing, if it has ended before.
        """
        with self._lock:
            self._requests.end(request_id)
            self._counters.requests_finished += 1

    def preempt(self, request_id: str) -> None:
        """End a running request that will resume by a new match. Raises `UnknownRequestError`."""
        with self._lock:
            self._requests.end(request_id, resumes=True)
            self._counters.requests_preempted += 1

    def release(self, request_id: str) -> None:
        """Undo the match and allocation of a request that was not scheduled: pins and LRU order are as before.

        Blocks that an eviction skipped meanwhile become the most recently used ones. Swap-ins planned for this request
        alone are cancelled, unless blocks below them are on the device. If the step of the allocation has been taken,
        the request counts as served and its blocks as used. Raises `UnknownRequestError`. Raises `CacheStateError` if
        it has committed blocks: finish or preempt it then.
        """
        with self._lock:
            self._requests.roll_back(request_id)

    def count_shared_prefill(self, num_tokens: int) -> None:
        """Count an admitted request that waited while another one computed its prefix, and so hit `num_tokens` more."""
        with self._lock:
            self._counters.shared_prefill_requests += 1
            self._counters.shared_prefill_tokens += num_tokens

    def expect(self, line: Sequence[BlockHashes]) -> None:
        """Name the requests waiting to be matched, the next one first: blocks that they would hit are evicted last.

        To be called before each scheduling step; only the first `KVCacheConfig.lookahead_requests` count. It is a hint:
        requests may still come, go and change their order. O(1), and O(runs of these prefixes) once in a step that
        evicts.
        """
        with self._lock:
            self._lookahead.expect(line)

    def tell_return(self, session: SessionHint) -> bool:
        """Take note of `session.return_in_s`, counted from now, for a session whose last request has ended or runs.

        Returns False for a session that is not known (any more). It is a hint, like `expect`. O(runs of its prefix).
        """
        with self._lock:
            return self._requests.tell_return(session)

    # ---- slots of a scheduler that keeps its own block tables

    def lend(self, count: int) -> list[DeviceSlot] | NoSpace:
        """Give the caller `count` device slots outside any block table. Atomic: `NoSpace` changes nothing."""
        with self._lock:
            slots = self._tiering.allocate_device(count)
            if not isinstance(slots, NoSpace):
                self._lent.update(slots)
            return slots

    def take_back(self, slots: Sequence[DeviceSlot]) -> None:
        """Free lent `slots`. Raises `BlockPoolError`, changing nothing, if one of them is not lent."""
        with self._lock:
            self._end_loan(slots)
            self._device_pool.free(slots)

    def adopt(self, request_id: str, slots: Sequence[DeviceSlot]) -> None:
        """Append lent `slots` to the block table of an admitted request, which owns them from now on.

        Raises `BlockPoolError`, changing nothing, if one of them is not lent, and `CacheStateError` if the request is
        not admitted.
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
        """Return all lent slots, for checks. O(lent slots)."""
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
        """Lend slots of tier `level` for blocks `hashes[first:]` of a prompt, at most `most`, for storage or a peer to
        fill.

        `hashes` begin with the prompt's first block; the manager keeps them, and they may only grow. Cached blocks are
        evicted to make room. If there are fewer slots than blocks, the load covers the first ones. `NoSpace`, which
        changes nothing, means no slot at all, or prefix caching is off. Respect `LoadSlots.after_step` before writing.

        Until `complete_load` its blocks cannot be matched, and its slots have no other owner. A load pins nothing: to
        keep the blocks before `first`, let a request match them. Raises `CacheStateError` if `load_id` has begun
        already or `first` is out of range. O(slots).
        """
        with self._lock:
            return self._loads.begin(load_id, hashes, first, level, most)

    def complete_load(self, load_id: str, num_arrived: int) -> int:
        """End a load whose first `num_arrived` blocks have arrived; nothing may write to its slots any more.

        Arrived blocks become ordinary cached blocks, the other slots are freed. Returns how many were cached. These are
        the last ones that arrived: earlier ones may be cached already. The result is 0 if the cache was reset, or if
        the blocks before it are no longer cached (for the device tier: on the device). `num_arrived` 0 aborts.
        Raises `CacheStateError`, changing nothing, for an unknown load or more blocks than it has slots. O(blocks).
        """
        with self._lock:
            return self._loads.complete(load_id, num_arrived)

    def begin_store(self, store_id: str, step: int, slots: Set[int]) -> StoreSource:
        """Keep the bytes of the blocks that `step` copied into host `slots` until `end_store`, for storage or a peer to
        read. The copy must have been reported as done, and no later step may have been told to fill one of `slots`.

        The result lacks blocks that have left the host; it is empty if `step` is too long ago. An empty result begins
        no store. A store pins nothing. Its slots are not evicted to make room; slots of blocks that are forgotten
        meanwhile are freed when the store ends.
        Raises `CacheStateError` if `store_id` has begun already. O(blocks named + runs above them).
        """
        with self._lock:
            return self._stores.begin(store_id, step, slots)

    def begin_device_store(
        self, store_id: str, hashes: Sequence[BlockHash], first: int, *, most: int | None = None
    ) -> StoreSource:
        """Keep the bytes of blocks `hashes[first:]` of a prompt on the device until `end_store`, for storage to read.

        `hashes` begin with the prompt's first block. The result has at most `most` blocks and ends before the first one
        that is not on the device. An empty result begins no store. The bytes are valid once the worker has ended every
        copy and pass of the steps taken so far, unless such a copy fails. A store pins nothing: blocks may leave the
        device meanwhile, and their slots are freed when the store ends.
        Raises `CacheStateError` if `store_id` has begun already. O(blocks).
        """
        with self._lock:
            return self._stores.begin_prefix(store_id, hashes, first, most, CacheLevel.DEVICE)

    def begin_host_store(
        self, store_id: str, hashes: Sequence[BlockHash], first: int, *, most: int | None = None
    ) -> StoreSource:
        """As `begin_device_store`, for blocks on the host. Blocks before `first` may be in another tier."""
        with self._lock:
            return self._stores.begin_prefix(store_id, hashes, first, most, CacheLevel.HOST)

    def end_store(self, store_id: str) -> None:
        """End a store: nothing reads its slots any more. Raises `CacheStateError` if it had no blocks or has ended."""
        with self._lock:
            self._stores.end(store_id)

    # ---- the worker

    def take_swap_step(self) -> SwapStep:
        """Hand over the copies decided since the last call. Steps are numbered without gaps and must reach the worker
        in order.

        Hits of requests admitted since then are counted now, and backups that they cause are part of this step.
        """
        with self._lock:
            self._tree.sweep(SWEPT_PER_STEP)
            self._requests.count_admitted()
            return self._tiering.take_step()

    @property
    def has_open_copies(self) -> bool:
        """True if copies are decided that no step has handed over."""
        with self._lock:
            return any(self._residency.open_copies(level) for level in CacheLevel)

    def transfer_failed(self, result: CopyResult) -> list[str]:
        """Forget the blocks that a failed copy should have filled, and every block below them.

        Returns the running requests that use such a block: preempt and recompute them. Report a failure before
        committing blocks computed on top of it. O(requests + blocks copied in that step), but O(cache) if more than
        `REMEMBERED_STEPS` steps with copies came after it.
        """
        if not result.target_slots:
            return []
        with self._lock:
            self._counters.failed_transfer_blocks += len(result.target_slots)
            return self._requests.drop_lost(self._tiering.forget_failed(result))

    # ---- administration

    def reset_cache(self, *, force: bool = False, new_weights: bool = False) -> None:
        """Forget every cached block of both tiers. `new_weights`: their KV is that of other weights.

        Running requests keep their blocks until they end, and cache nothing more. `force` ends them too, frees lent
        slots and drops copies not taken yet: the caller must have stopped the worker. What loads bring is
        not cached; their slots, and those that a store reads, stay reserved until they end. O(requests + blocks in
        use), plus a copy of the pools' lists; later steps free the forgotten runs, a few in each.
        """
        with self._lock:
            if force:
                self._requests.end_all()
                self._lent.clear()
            self._loads.cancel_all()
            in_use = self._requests.forget_matches()
            self._history.forget()
            self._tree.detach_all(in_use, self._device_slots_outside(), self._loads.slots(CacheLevel.HOST))
            self.misses.blame_reset(MissReason.WEIGHTS if new_weights else MissReason.RESET)
            self._tiering.told = CopiesByStep()
            self._log.restart(self._device_pool.size + self._host_pool.size)
            if force:
                self._residency.close_copies()

    def weights_changed(self) -> None:
        """Tell that blocks which the last reset forgot could not have been used anyway: new weights were loaded."""
        with self._lock:
            self.misses.blame_reset(MissReason.WEIGHTS)

    def resize_device_pool(self, num_device_blocks: int) -> None:
        """Grow or shrink the device tier. Cached blocks above the new end are evicted; their host copies stay.

        Raises `ConfigError` for a size below 1. Raises `PoolInUseError`, changing nothing, if a request, a load or a
        store uses a slot above the new end, or if an open copy reads one. O(cache).
        """
        size = operator.index(num_device_blocks)
        if size < 1:
            raise ConfigError(f"the device pool needs at least 1 block, got {size}")
        with self._lock:
            self._tiering.evict_above(size)
            grows = size > self._device_pool.size
            self._device_pool.resize(size)
            if grows:
                self._pieces.resize(size + self._host_pool.size)
            self._log.restart(size + self._host_pool.size, is_empty=False)

    def take_events(self) -> list[CacheEvent]:
        """Return the blocks stored in and removed from each tier since the last call, in order.

        The first call subscribes; until then events cost nothing. The first list starts with `cleared` and describes
        the whole cache, in O(cache). So does the next one after events named more than `max_queued_events` blocks. With
        `max_queued_events` 0 there are no events.
        """
        with self._lock:
            return self._events.take(self._tree.runs())

    # ---- looking

    def count_cached(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prompt are cached in any tier. Pins and counts nothing."""
        with self._lock:
            return sum(count for _, count in self._tree.look(hashes))

    def count_on_device(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prompt are on the device. Pins and counts nothing."""
        with self._lock:
            return sum(count for run, count in self._tree.look(hashes) if run.on_device)

    def num_cached(self, request_id: str) -> int:
        """Return how many leading blocks of the request's table are cached. Raises `UnknownRequestError`."""
        with self._lock:
            return self._requests[request_id].num_cached

    def num_blocks(self, request_id: str) -> int:
        """Return the length of the request's block table, 0 before it is admitted. Raises `UnknownRequestError`."""
        with self._lock:
            return self._requests[request_id].num_blocks

    def block_table(self, request_id: str) -> list[DeviceSlot]:
        """Copy the request's block table: device slots in prompt order. O(its blocks). Raises `UnknownRequestError`."""
        with self._lock:
            return self._requests[request_id].block_table()

    @property
    def num_device_blocks(self) -> int:
        with self._lock:
            return self._device_pool.size

    @property
    def num_free_device_blocks(self) -> int:
        """Device slots without any content. Slots of cached blocks do not count, even if they can be evicted."""
        with self._lock:
            return self._device_pool.num_free

    @property
    def num_available_device_blocks(self) -> int:
        """Device slots that `allocate` could get now: free ones and evictable ones."""
        with self._lock:
            return self._tiering.num_available_device

    def miss(self, request_id: str) -> Miss | None:
        """Return what a recent request missed, and why, also after its end. None: it was not admitted, or too long ago.

        It is known once the step of its admission is taken. For a request that resumed it stays that of its first
        admission.
        """
        with self._lock:
            return self.misses.of(request_id)

    def tell_stored(self, request_id: str, stored: StoredPrefix) -> None:
        """Tell what the storage tier knows of a request's prompt: what it knew when the step of the admission was taken
        counts.
        """
        with self._lock:
            self.misses.tell_stored(request_id, stored)

    def report(self, parts: Parts = ()) -> CacheReport:
        """Tell what the latest requests missed, and why, and the metrics of `parts`. Takes milliseconds."""
        with self._lock:
            device, host = self._device_pool.size, self._host_pool.size
            requests = self.misses.latest(MOST_LISTED)
        block_size, block_bytes = self.config.block_size, self.config.block_bytes
        return CacheReport(self._name, block_size, block_bytes, device, host, requests, samples_of(parts))

    def traffic(self) -> Traffic:
        """Return the latest requests, for `sizing`. It takes half a second at most, and the lock for less than 1 ms."""
        with self._lock:
            rate, is_whole, rows = self._log.copied()
        return Traffic(rate, is_whole, list(map(row_of, rows)))

    def stats(self) -> CacheStats:
        """Take a snapshot of counters and gauges. O(requests and loads)."""
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
                sessions=len(self._history.sessions),
                watched_blocks=len(self._history),
                recency_rules=not self._history.judge.trusts,
                events_overflowed=self._events.overflows,
            )

    def snapshot(self, most_blocks: int = 1024, *, stored: Container[BlockHash] = ()) -> CacheSnapshot:
        """Describe which runs are in which tier. Lists runs of `most_blocks` blocks (2,048 at most)
        and counts the cached blocks left out. `stored` contains the blocks known to be in storage.

        Holds the lock for O(most_blocks + requests + loads), at most about 2 ms, independent of the size of the cache.
        The snapshot has no block hash, request id, token or tenant. Its counts show how much of the cache is in use.
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
        """Raise `InvariantError` unless every slot has exactly one owner and every pin a request. O(cache)."""
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
        """`check`, and raise `InvariantError` unless every allocated slot is cached and evictable. O(cache)."""
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
        """Return how many blocks `ReuseHistory` may watch: twice the cache, within limits. About 300 bytes each."""
        num_blocks = self._device_pool.size + self._host_pool.size
        return max(LEAST_WATCHED, min(2 * num_blocks, MOST_WATCHED))

    def _device_slots_outside(self) -> list[DeviceSlot]:
        """Return every allocated device slot that the tree does not own."""
        return [*self._requests.own_slots(), *self._lent, *self._loads.slots(CacheLevel.DEVICE)]

    def _num_device_slots_outside(self) -> int:
        """O(requests and loads)."""
        return self._requests.num_own_slots + len(self._lent) + self._loads.num_slots(CacheLevel.DEVICE)
