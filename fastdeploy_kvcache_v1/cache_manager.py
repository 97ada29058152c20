"""CacheManager: the scheduler half. It decides which block is where; the worker half moves the bytes.

A request's life: `match_prefix` -> `allocate` (again and again while it grows) -> `commit` (what has been computed is
now matchable) -> `finish`, or `preempt`, or `release` when it was not scheduled after all. Once per scheduling step
`take_swap_step` hands over every copy decided since the last one; the worker runs its evictions, then its swap-ins,
then the forward pass. That order is why an evicted device slot may be used again at once, and why a host slot that an
open copy reads or fills may not: its run stays pinned, or open, until the step is taken.

Every public method takes one lock, is atomic, and costs O(the request's own blocks), independent of the cache's size,
unless it says otherwise.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .block_pool import DeviceBlockPool, HostBlockPool
from .cache_stats import CacheStats, Counters
from .config import KVCacheConfig
from .errors import CacheStateError, ConfigError, UnknownRequestError
from .event_log import EventLog
from .invariants import expect
from .lent_slots import LentSlots
from .metadata import (
    Allocation,
    BlockHashes,
    BlockNode,
    CacheEvent,
    DeviceSlot,
    MatchResult,
    NoSpace,
    SwapStep,
    TransferResult,
)
from .open_step import OpenStep
from .radix_tree import RadixTree
from .request_state import RequestState
from .residency import Residency
from .run import Run
from .tiering import Tiering


class CacheManager:
    """See the module's text. Thread-safe."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self._lock = threading.RLock()
        self._counters = Counters()
        self._events = EventLog(config.max_queued_events)
        self._device_pool = DeviceBlockPool(config.num_device_blocks)
        self._host_pool = HostBlockPool(config.num_host_blocks)
        self._residency = Residency(self._device_pool, self._host_pool, self._events)
        self._tree = RadixTree(self._residency)
        self._tiering = Tiering(config, self._tree, self._residency, self._device_pool, self._host_pool, self._counters)
        self._requests: dict[str, RequestState] = {}
        self._lent = LentSlots()
        self._step = OpenStep(self._counters)
        self._epoch = 0
        """How often the cache was reset: what a request of an earlier epoch computes is never found."""

    # ---- the life of a request

    def match_prefix(self, request_id: str, sequence: BlockHashes, *, max_blocks: int | None = None) -> MatchResult:
        """Find and pin the longest cached prefix of `sequence`, at most all blocks before its last token (and, when
        given, at most `max_blocks`).

        The manager keeps `sequence` and reads its growing hashes in `commit`. Raises `CacheStateError` if the request
        is already known: release, preempt or finish it first.
        """
        block_size = self.config.block_size
        with self._lock:
            if request_id in self._requests:
                raise CacheStateError(f"request {request_id} is matched already: release or finish it first")
            limit = min(len(sequence.hashes), max(0, sequence.num_tokens - 1) // block_size)
            limit = limit if max_blocks is None else min(limit, max_blocks)
            leaf = self._tree.match(sequence.hashes, limit if self.config.enable_prefix_caching else 0)
            spans = tuple(run.span() for run in self._tree.path(leaf))
            num_cached = sum(len(span.hashes) for span in spans)
            request = RequestState(request_id, sequence, leaf, num_cached, self._epoch)
            self._requests[request_id] = request
            return MatchResult(request_id, spans, block_size)

    def allocate(self, request_id: str, num_tokens: int) -> Allocation | NoSpace:
        """Grow the request's block table to hold `num_tokens` tokens. Atomic: `NoSpace` changes nothing.

        The first call admits the request: matched blocks on the host get device slots, and their swap-in is planned.
        Raises `UnknownRequestError`, or `CacheStateError` if `num_tokens` does not cover the matched prefix.
        """
        with self._lock:
            request = self._request(request_id)
            num_blocks = -(-num_tokens // self.config.block_size)
            if not request.admitted:
                return self._admit(request, num_blocks, num_tokens)
            slots = self._tiering.allocate_device(max(0, num_blocks - len(request.table)))
            if isinstance(slots, NoSpace):
                return slots
            request.grow(slots, num_tokens, self._step.number)
            return Allocation(list(request.table), slots, 0, 0)

    def _admit(self, request: RequestState, num_blocks: int, num_tokens: int) -> Allocation | NoSpace:
        if num_blocks < request.num_cached:
            raise CacheStateError(f"request {request.request_id}: {num_tokens} tokens are fewer than its cached prefix")
        path = self._tree.path(request.leaf)
        num_swap_in = sum(len(run.hashes) for run in path if run.device is None)
        slots = self._tiering.allocate_device(num_swap_in + num_blocks - request.num_cached)
        if isinstance(slots, NoSpace):
            return slots
        table, used = request.table, 0
        for run in path:
            if run.device is None:
                self._residency.start_swap_in(run, slots[used : used + len(run.hashes)])
                used += len(run.hashes)
            assert run.device is not None
            table += run.device
        request.grow(slots[used:], num_tokens, self._step.number)
        request.admit(used * self.config.block_size, self.config.block_size)
        self._step.admit(request)
        self._tree.hit(request.leaf)
        self._tiering.back_up_hit(path)
        return Allocation(list(table), slots[used:], request.num_device_tokens, request.num_host_tokens)

    def commit(self, request_id: str, num_computed_tokens: int, *, in_flight: bool = False) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens matchable.

        Their KV must have been written. With `in_flight` it is written by the step being scheduled now: the blocks
        become matchable, and are backed up, only after `take_swap_step` has closed that step. The newest token of the
        sequence is never counted: a sampled token has no KV yet. Idempotent; fewer tokens than before are ignored.
        Raises `UnknownRequestError`, or `CacheStateError` for tokens without a block, blocks without a hash, or tokens
        that cannot have been computed because the step that allocated them has not been taken.
        """
        with self._lock:
            request = self._request(request_id)
            open_step = None if in_flight else self._step.number
            num_blocks = request.committable_blocks(num_computed_tokens, self.config.block_size, open_step=open_step)
            if in_flight:
                self._step.commit_later(request_id, num_blocks)
            else:
                self._commit(request, num_blocks)

    def _commit(self, request: RequestState, num_blocks: int) -> None:
        first = request.num_cached
        if num_blocks <= first or not self.config.enable_prefix_caching:
            return
        if request.epoch != self._epoch or request.leaf.detached:
            return  # computed on top of blocks that were reset or lost: never to be found
        hashes = request.sequence.hashes[first:num_blocks]
        leaf, duplicates = self._tree.insert(request.leaf, hashes, request.table[first:num_blocks])
        request.leaf, request.num_cached, request.has_committed = leaf, num_blocks, True
        request.duplicates += duplicates
        self._counters.duplicate_blocks += len(duplicates)
        self._tiering.back_up_completed(self._tree.path(leaf), num_blocks - first)

    def finish(self, request_id: str) -> None:
        """The request is done (or aborted): its committed blocks stay cached, everything else is free again.

        Raises `UnknownRequestError`, freeing nothing, when it was finished before.
        """
        with self._lock:
            self._give_back(request_id, touch=True)
            self._counters.requests_finished += 1

    def preempt(self, request_id: str) -> None:
        """Take everything from a running request; it resumes by a new match. Raises `UnknownRequestError`."""
        with self._lock:
            self._give_back(request_id, touch=True)
            self._counters.requests_preempted += 1

    def release(self, request_id: str) -> None:
        """Undo the match (and allocation) of a request that was not scheduled: pins, hits and LRU order as before.

        Swap-ins planned for it alone are cancelled. Raises `UnknownRequestError`, or `CacheStateError` if it has
        committed blocks: finish or preempt it then.
        """
        with self._lock:
            request = self._request(request_id)
            if request.has_committed:
                raise CacheStateError(f"request {request_id} has computed blocks: finish or preempt it instead")
            if request.admitted:
                self._tree.hit(request.leaf, -1)
                self._step.roll_back(request_id)
            self._give_back(request_id, touch=False)

    def _give_back(self, request_id: str, *, touch: bool) -> None:
        request = self._request(request_id)
        del self._requests[request_id]
        self._step.end(request_id)
        self._device_pool.free(request.own_slots())
        self._tree.release(request.leaf, touch=touch)

    # ---- slots of a scheduler that keeps its own block tables

    def lend(self, count: int) -> list[DeviceSlot] | NoSpace:
        """`count` device slots for the caller to own, outside any block table. Atomic: `NoSpace` changes nothing."""
        with self._lock:
            slots = self._tiering.allocate_device(count)
            if not isinstance(slots, NoSpace):
                self._lent.lend(slots)
            return slots

    def take_back(self, slots: Sequence[DeviceSlot]) -> None:
        """The caller owns `slots` no longer. Raises `BlockPoolError`, changing nothing, if one of them is not lent."""
        with self._lock:
            self._lent.end(slots)
            self._device_pool.free(slots)

    def adopt(self, request_id: str, slots: Sequence[DeviceSlot]) -> None:
        """Lent `slots` become the next entries of an admitted request's block table, to be committed and given back
        with it. Raises `BlockPoolError`, changing nothing, if one of them is not lent.
        """
        with self._lock:
            request = self._request(request_id)
            if not request.admitted:
                raise CacheStateError(f"request {request_id} has no block table yet: allocate first")
            self._lent.end(slots)
            request.table += slots

    def lent_slots(self) -> frozenset[DeviceSlot]:
        """Every slot the caller of `lend` owns; O(lent), for checks."""
        with self._lock:
            return frozenset(self._lent)

    # ---- the worker

    def take_swap_step(self) -> SwapStep:
        """Every copy decided since the last call. Steps are numbered without gaps and reach the worker in order."""
        with self._lock:
            step = self._tiering.take_step(self._step.number)
            for request_id, num_blocks in self._step.close().items():
                self._commit(self._requests[request_id], num_blocks)
            return step

    def transfer_failed(self, result: TransferResult) -> list[str]:
        """A copy failed in the worker: its targets hold garbage and are forgotten, with every block below them.

        Returns the running requests that use such a block: preempt and recompute them. O(cache).
        """
        failed = frozenset(result.target_slots)
        if not failed:
            return []
        with self._lock:
            self._counters.failed_transfer_blocks += len(failed)
            lost = self._tiering.forget_failed(result.target, failed)
            return self._requests_on(lost)

    def _requests_on(self, lost: set[Run]) -> list[str]:
        """Admitted requests that use a run of `lost`; matches that were not admitted yet simply become empty."""
        affected = []
        for request_id, request in self._requests.items():
            if request.leaf not in lost:
                continue
            if request.admitted:
                affected.append(request_id)
            else:
                self._forget_match(request)
        return affected

    def _forget_match(self, request: RequestState) -> None:
        self._tree.release(request.leaf, touch=False)
        request.leaf, request.num_cached = self._tree.root, 0

    # ---- administration

    def reset_cache(self, *, force: bool = False) -> None:
        """Forget every cached block of both tiers.

        Running requests keep their blocks until they end and cache nothing more. With `force` they are forgotten too,
        all slots, lent ones included, are free, and copies not yet taken are dropped: the caller has stopped the
        worker's use of them. O(cache).
        """
        with self._lock:
            self._epoch += 1
            self._tree.detach_all()
            self._events.cleared()
            for request_id, request in list(self._requests.items()):
                if force:
                    self._give_back(request_id, touch=False)
                elif not request.admitted:
                    self._forget_match(request)
                    request.epoch = self._epoch
            if force:
                self._device_pool.free(self._lent.end_all())
                self._tiering.abandon()

    def resize_device_pool(self, num_device_blocks: int) -> None:
        """Grow, or shrink: cached blocks above the new end are evicted (their host copies stay).

        Raises `ConfigError` for a size below 1, and `PoolInUseError`, with no change, when a request uses a slot above
        the new end or such a slot still waits to be copied out. O(cache) when shrinking.
        """
        size = operator.index(num_device_blocks)
        if size < 1:
            raise ConfigError(f"the device pool needs at least 1 block, got {size}")
        with self._lock:
            if size < self._device_pool.size:
                self._tiering.evict_above(size)
            self._device_pool.resize(size)

    def take_events(self) -> list[CacheEvent]:
        """What was stored in and removed from each tier since the last call, in order.

        If more than `max_queued_events` piled up, the list starts with `cleared` and describes the whole cache anew.
        """
        with self._lock:
            events = self._events.take()
            if events is None:
                events = self._tree.snapshot_events()
            return events

    # ---- looking

    def nodes(self, request_id: str) -> tuple[BlockNode, ...]:
        """The cached blocks the request uses, in prompt order. Raises `UnknownRequestError`."""
        with self._lock:
            path = self._tree.path(self._request(request_id).leaf)
            return tuple(node for run in path for node in run.nodes())

    def block_table(self, request_id: str) -> list[DeviceSlot]:
        """A copy of the request's block table. Raises `UnknownRequestError`."""
        with self._lock:
            return list(self._request(request_id).table)

    @property
    def num_device_blocks(self) -> int:
        with self._lock:
            return self._device_pool.size

    @property
    def num_free_device_blocks(self) -> int:
        """Device slots nobody owns, cached blocks excluded."""
        with self._lock:
            return self._device_pool.num_free

    @property
    def num_available_device_blocks(self) -> int:
        """Device slots an `allocate` could get now: free ones and evictable ones."""
        with self._lock:
            return self._tiering.num_available_device

    def stats(self) -> CacheStats:
        """O(requests)."""
        with self._lock:
            owned = sum(request.num_own_slots for request in self._requests.values()) + len(self._lent)
            return CacheStats(
                counters=replace(self._counters),
                num_requests=len(self._requests),
                device_blocks=self._device_pool.size,
                device_free_blocks=self._device_pool.num_free,
                device_cached_blocks=self._device_pool.num_allocated - owned,
                device_evictable_blocks=self._residency.num_device_evictable,
                host_blocks=self._host_pool.size,
                host_free_blocks=self._host_pool.num_free,
                host_cached_blocks=self._host_pool.num_allocated,
                events_overflowed=self._events.overflows,
            )

    def check(self) -> None:
        """Raises `InvariantError` unless every slot has exactly one owner and every pin a request; O(cache)."""
        with self._lock:
            self._residency.check(self._tree.runs())
            self._tiering.check()
            runs = [*self._tree.runs(), *self._residency.detached_runs()]
            cached = [slot for run in runs for slot in run.device or ()]
            owned = [slot for request in self._requests.values() for slot in request.own_slots()]
            self._device_pool.check_owners([*cached, *owned, *self._lent])
            self._host_pool.check_owners([slot for run in runs for slot in run.host_slots or ()])
            paths = {request_id: self._tree.path(request.leaf) for request_id, request in self._requests.items()}
            pins = Counter(run for path in paths.values() for run in path)
            for run in runs:
                expect(run.pins == pins[run], f"manager: a run is pinned {run.pins} times by {pins[run]} requests")
            for request_id, request in self._requests.items():
                request.check(paths[request_id])
            expect(self._requests.keys() >= self._step.named_requests(), "manager: a request lives on")

    def check_idle(self) -> None:
        """`check`, and nobody holds anything: every allocated slot is cached and evictable."""
        with self._lock:
            self.check()
            expect(not self._requests, f"manager: requests never ended: {', '.join(list(self._requests)[:8])}")
            forgotten = any(True for _ in self._residency.detached_runs())
            expect(not forgotten, "manager: forgotten blocks still hold slots; take the swap step first")
            expect(self._tiering.num_available_device == self._device_pool.size, "manager: device slots leaked")

    # ---- inside

    def _request(self, request_id: str) -> RequestState:
        try:
            return self._requests[request_id]
        except KeyError:
            raise UnknownRequestError(f"request {request_id} is unknown, or has been finished already") from None
