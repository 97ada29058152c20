"""PrefixCacheAdapter: the interface of FastDeploy's cache manager over our `CacheManager`.

FastDeploy keeps its own block tables: it allocates and recycles ids by hand, and calls a prefix of a request's table
"cached", which the cache manager then owns. So an id has exactly one of two owners. It is *lent* to FastDeploy
(`LentIds`), or it belongs to the manager: cached, or in the table of an admitted request whose first
`task.num_cached_blocks` entries the manager holds. `update_cache_blocks` moves ids from FastDeploy to the manager.

Deliberate differences from FastDeploy's own manager: a match never reaches the last token, so no shared block is ever
rewritten. A match never ends inside an image where FastDeploy would go back before it. Blocks that a batch computes
become matchable when the batch has reached the workers' queue (`batch_sent`), and never if it was lost
(`batch_lost`). Swap-ins are planned here and awaited layer by layer in the worker, never in `schedule`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from ...config import KVCacheConfig
from ...contract.messages import CopyResult, DeviceSlot, MatchResult, NoSpace, PrefillTime, SwapStep
from ...errors import BlockPoolError, CacheStateError, InvariantError
from ...scheduler.cache_manager import CacheManager
from ...scheduler.costs import PrefillCosts
from ...sizing.planner import Planner
from ..transport import RunningRow, SwapOutbox
from .fastdeploy_gauges import HitRates, PoolGauges, match_metrics
from .kept_hashes import KeptHashes
from .lent_ids import LentIds
from .open_batch import OpenBatch
from .record import Record
from .storage import EngineStorage
from .task_tokens import TaskTokens, start_of_cut_item
from .traced_requests import TracedRequests
from .uncached import Uncached
from .waiting_requests import WaitingRequests

logger = logging.getLogger(__name__)


class PrefixCacheAdapter:
    """Thread-safe. `gauges` has FastDeploy's metric objects as attributes; they follow once per batch.

    `whole_items` says that FastDeploy never computes part of an image: see `start_of_cut_item`.
    """

    numbers_batches = False
    """Whether every batch tells the workers its number, also without copies."""
    preempted_leave = False
    """Whether a preempted request leaves this server, and its client is told by the task that says so."""
    preempted_wait = True
    """Whether a preempted request waits for its stored blocks before it is in FastDeploy's queue."""
    gpu_cache_lock: Any = None
    """FastDeploy sets it: its lock between engine and transfer process. Unused here."""

    def __init__(self, config: KVCacheConfig, *, gauges: Any, whole_items: bool = False) -> None:
        self.manager = CacheManager(config)
        self.planner = Planner(self.manager)
        self.hit_rates = HitRates()
        self.uncached = Uncached()
        self.num_cpu_blocks = config.num_host_blocks
        self.storage: EngineStorage | None = None
        """None without storage."""
        self.traced: TracedRequests | None = None
        """None where no trace is recorded."""
        self.tool_call_ends: frozenset[int] = frozenset()
        """Tokens of the model, see `tool_calls`."""
        self.num_recycled_wrongly = 0
        """Ids that FastDeploy recycled without owning them; discarded."""
        self._gauges = gauges
        self._whole_items = whole_items
        self._block_size = config.block_size
        self._lock = threading.RLock()
        self._records: dict[str, Record] = {}
        self._batch = OpenBatch(config.block_size, config.shared_prefill_tokens)
        self._prefill_costs = PrefillCosts()
        self._lent = LentIds(self.manager)
        self._kept = KeptHashes()
        self._waiting = WaitingRequests(self.manager, self._batch, self._kept, config.block_size)
        self._outbox = SwapOutbox()
        self._has_news = False
        self._pool_gauges = PoolGauges(self.manager, gauges)
        gauges.max_cpu_block_num.set(self.num_cpu_blocks)
        self._pool_gauges.publish_size()

    # ---- ids that FastDeploy owns

    @property
    def num_gpu_blocks(self) -> int:
        return self.manager.num_device_blocks

    @property
    def gpu_free_block_list(self) -> range:
        """Only its length means something: ids that are neither used nor cached."""
        return range(self.manager.num_free_device_blocks)

    @property
    def available_gpu_resource(self) -> float:
        return self.manager.num_free_device_blocks / self.manager.num_device_blocks

    def can_allocate_gpu_blocks(self, num_blocks: int, try_free_gpu_blocks: bool = True) -> bool:
        """Would `allocate_gpu_blocks` succeed now? Evictable blocks count unless told otherwise."""
        if num_blocks <= 0:
            return True
        manager = self.manager
        return num_blocks <= (
            manager.num_available_device_blocks if try_free_gpu_blocks else manager.num_free_device_blocks
        )

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str | None = None) -> list[DeviceSlot]:
        """Raises `CacheStateError` when there are too few: FastDeploy asks first."""
        if num_blocks <= 0:
            return []
        with self._lock:
            self._has_news = True
            return self._lent.lend(int(num_blocks), req_id)

    def recycle_gpu_blocks(self, gpu_block_ids: Sequence[int] | int, req_id: str | None = None) -> None:
        """Ids that are not lent (to that request) are counted and ignored: they came back before, or after a reset."""
        ids = gpu_block_ids if isinstance(gpu_block_ids, (list, tuple)) else [gpu_block_ids]
        with self._lock:
            self._has_news = True
            self.num_recycled_wrongly += self._lent.take_back(ids, req_id)

    def get_required_block_num(self, input_token_num: int, block_size: int) -> int:
        return -(-input_token_num // block_size)

    # ---- the life of a request

    def waits_for_storage(self, task: Any) -> bool:
        """Whether a request that has just come, or was preempted, waits for its stored prefix, see
        `EngineStorage.hold`. Its tokens are hashed here, on the thread that brings it, and the hashes are kept for its
        match.
        """
        if self.storage is None:
            return False
        try:
            with self._lock:
                tokens = self._kept.take(task)
            tokens = TaskTokens(task, self._block_size) if tokens is None else tokens
            with self._lock:
                self._kept.keep(tokens)
                return self.storage.hold(task, tokens)
        except Exception:  # the edge to what clients send: the requests behind this one must not be lost
            logger.exception("request %s starts without its stored prefix", task.request_id)
            return False

    def expect(self, line: Sequence[Any]) -> None:
        """Requests that wait to be matched, the next one first: what they will hit is evicted last. Before `schedule`.

        At most one of them is hashed that was not before, so that a long line delays no step; its match finds the
        hashes ready.
        """
        with self._lock:
            self._waiting.expect(line)

    def waits_for_prefill(self, task: Any, line: Iterable[Any]) -> bool:
        """Whether a request should wait for blocks that the batch computes for another one, see `OpenPrefills`. `line`:
        the other requests that wait.
        """
        with self._lock:
            return self._waiting.waits_for_prefill(task, line)

    def num_uncached_tokens(self, task: Any) -> int:
        """Tokens of a waiting request that it would compute now, or more: a video is one item until its match."""
        with self._lock:
            return int(task.num_total_tokens) - self._num_usable(task, self._waiting.num_cached_tokens(task))

    def computes(self, task: Any) -> bool:
        """Whether the batch that is being put together computes tokens of a request."""
        with self._lock:
            return self._batch.computes(task.request_id)

    def may_match(self, task: Any) -> bool:
        """Whether FastDeploy may match it now: one that was preempted waits for what a store is about to give back."""
        return self.storage is None or not self.storage.must_wait(task)

    def request_match_blocks(self, task: Any, block_size: int, *_: Any) -> tuple[list[DeviceSlot], int, dict[str, Any]]:
        """Returns the cached prefix as (fresh block table, its tokens, FastDeploy's dictionary of metrics).

        Raises `CacheStateError` when the device has no room for its host blocks: FastDeploy then tries again later, and
        every request behind this one waits. So nothing else is raised: a request that cannot be matched, or that has
        the id of a live request, is served without the cache.
        """
        with self._lock:
            self._has_news = True
            try:
                admitted = self._admit(task)
            except Exception:  # the edge to what clients send: see above
                logger.exception("request %s is served without the cache: matching it failed", task.request_id)
                self._give_up(task)
                self.uncached.count(task, "failed")
                admitted = None
            if isinstance(admitted, NoSpace):
                raise CacheStateError(f"{task.request_id}: no device room for {admitted.needed} host blocks")
            if admitted is None:
                admitted = [], 0, match_metrics(MatchResult(task.request_id, (), self._block_size), ())
            task.num_cached_blocks = len(admitted[0])
            return admitted

    def _admit(self, task: Any) -> tuple[list[DeviceSlot], int, dict[str, Any]] | NoSpace | None:
        """None when another request has the id: the blocks that it reads are in its record."""
        record = self._records.get(task.request_id)
        if record is not None and record.tokens.task is not task:
            logger.warning("request %s is served without the cache: a live request has the same id", task.request_id)
            self.uncached.count(task, "same_id")
            return None
        self._forget(task.request_id)
        tokens = self._kept.take(task) or TaskTokens(task, self._block_size)
        if tokens.uncached is not None:
            self.uncached.count(task, tokens.uncached)
        match = self._match(task, tokens)
        allocation = self.manager.allocate(task.request_id, match.num_tokens)
        if isinstance(allocation, NoSpace):
            self.manager.release(task.request_id)
            self._kept.keep(tokens)
            return allocation
        table = self.manager.block_table(task.request_id)
        self._records[task.request_id] = Record(tokens, len(table))
        self._batch.match(task, num_loading_tokens=match.num_host_blocks * self._block_size)
        metrics = match_metrics(match, table, tokens.hashes, None if self.storage is None else self.storage.tier.unused)
        if tokens.access.reads:
            device, host, stored = (metrics[f"{tier}_match_token_num"] for tier in ("gpu", "cpu", "storage"))
            self.hit_rates.count(tokens.num_tokens, device=device, host=host, stored=stored)
        return table, match.num_tokens, metrics

    def _match(self, task: Any, tokens: TaskTokens) -> MatchResult:
        """What it starts from."""
        resumed = task.status.name == "PREEMPTED"
        match = self.manager.match_prefix(task.request_id, tokens, resumed=resumed)
        most = self._num_usable(task, match.num_tokens) // self._block_size
        if most < match.num_blocks:
            self.manager.release(task.request_id)
            match = self.manager.match_prefix(task.request_id, tokens, max_blocks=most, resumed=resumed)
        return match

    def _num_usable(self, task: Any, num_cached: int) -> int:
        """Of the first `num_cached` tokens of a request, which are cached, those that FastDeploy does not compute."""
        return start_of_cut_item(task, num_cached, self._block_size) if self._whole_items and num_cached else num_cached

    def _give_up(self, task: Any) -> None:
        """Undo what `_admit` had done when it failed."""
        self._batch.end(task.request_id)
        self._records.pop(task.request_id, None)
        with suppress(CacheStateError):
            self.manager.release(task.request_id)

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """A batch that computes the first `num_computed_tokens` tokens is being put together."""
        with self._lock:
            record = self._record_of(task)
            if record is None:
                return
            self._count_start(record)
            if self.storage is not None and not record.is_scheduled:
                self.storage.tier.request_used(record.tokens.hashes[: record.num_owned])
            record.is_scheduled = True
            if self.traced is not None:
                self.traced.scheduled(record.tokens)
            self._hand_over(task, record, min(num_computed_tokens, record.tokens.num_tokens - 1) // self._block_size)
            num_tokens = 0 if record.has_hole else record.num_owned * self._block_size
            uncommitted = self.manager.uncommitted(task.request_id, num_tokens)
            self._batch.compute(task.request_id, uncommitted)

    def _count_start(self, record: Record) -> None:
        """The request may be scheduled for the first time."""
        if record.tokens.tokens_before_wait is not None:
            found = record.num_owned * self._block_size - record.tokens.tokens_before_wait
            self.manager.count_shared_prefill(max(0, found))
            record.tokens.tokens_before_wait = None

    def cache_output_blocks(self, task: Any, block_size: int) -> None:
        """The request is complete. Its last token was sampled and never computed."""
        with self._lock:
            record = self._record_of(task)
            if record is None or not record.is_scheduled or self._batch.computes(task.request_id):
                return  # a request cannot be complete whose prompt is still on its way, or was lost there
            record.tokens.catch_up()
            self._hand_over(task, record, (record.tokens.num_tokens - 1) // self._block_size)
            self._commit(task.request_id, record)

    def release_block_ids(self, task: Any) -> None:
        """The request is unscheduled, preempted, aborted, or finished. Unknown requests are ignored."""
        with self._lock:
            if self._record_of(task) is not None:
                self._forget(task.request_id)

    def _hand_over(self, task: Any, record: Record, num_blocks: int) -> None:
        """The manager takes over the first `num_blocks` ids of the table."""
        end = min(num_blocks, len(record.tokens.hashes), len(task.block_tables))
        slots = [DeviceSlot(int(slot)) for slot in task.block_tables[record.num_owned : end]]
        if not slots or record.has_hole:
            return
        try:
            self.manager.adopt(task.request_id, slots)
        except BlockPoolError as error:
            logger.error("blocks of request %s are not cached: %s", task.request_id, error)
            return
        self._lent.end(slots)
        record.num_owned = task.num_cached_blocks = end

    def _commit(self, request_id: str, record: Record) -> None:
        """All that the manager holds of the request is computed, or will be before anything that is sent later."""
        if record.num_owned > record.num_computed and not record.has_hole:
            record.num_computed = record.num_owned
            self.manager.commit(request_id, record.num_owned * self._block_size)

    def _forget(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        self._batch.end(request_id)
        if record is None:
            return
        if not record.is_scheduled:
            self.manager.release(request_id)
            self._kept.keep(record.tokens)
        elif record.tokens.task.status.name == "PREEMPTED":
            self.manager.preempt(request_id)
            self._kept.keep(record.tokens)
            self._tell_ended(record)
        else:
            record.tokens.see_end(self.tool_call_ends)
            self.manager.finish(request_id)
            self._tell_ended(record)
            if self.traced is not None:
                self.traced.ended(request_id)

    def _tell_ended(self, record: Record) -> None:
        if self.storage is not None:
            self.storage.request_ended(record.tokens)

    def _record_of(self, task: Any) -> Record | None:
        """None also for an earlier request of the same id: ids come from clients."""
        record = self._records.get(task.request_id)
        return record if record is not None and record.tokens.task is task else None

    # ---- the batch

    def carrier(self, manager: Any) -> list[Any]:
        """A batch without work, for what has to reach the workers though FastDeploy's `manager` schedules nothing.
        Empty where that can wait for its next batch.
        """
        return []

    def send_swaps(self, tasks: Sequence[Any], running: Sequence[RunningRow] | None = None) -> None:
        """Let every copy decided since the last batch ride on `tasks`; without tasks they wait. Once per `schedule`,
        so the gauges follow here and not with every id. `running`: see `SwapOutbox.attach`.
        """
        with self._lock:
            self._roll_back_unscheduled()
            if self._kept:
                for task in tasks:
                    if task.task_type.name == "ABORT":  # it ended as if it had been preempted
                        self._kept.end(task.request_id)
            if self.traced is not None:
                for task in tasks:
                    if task.task_type.name == "ABORT":
                        self.traced.ended(task.request_id)
            if tasks:
                step = self.manager.take_swap_step()
                always = self.numbers_batches or (self.storage is not None and self.storage.follows_passes)
                self._outbox.attach(tasks, step, always=always, running=running)
                if self.storage is not None:
                    self.storage.batch_scheduled(tasks, step)
                self._batch_scheduled(tasks, step)
            else:
                self._outbox.clear()
            if tasks or self._has_news:
                self._has_news = False
                self._pool_gauges.publish_free()
                self.hit_rates.publish(self._gauges)

    def _batch_scheduled(self, tasks: Sequence[Any], step: SwapStep) -> None:
        """For roles. `step` rides on `tasks`."""

    def batch_sent(self) -> None:
        """The last batch is in the workers' queue: what it computes may be matched from now on."""
        with self._lock:
            self._outbox.clear()
            for request_id in self._batch.close():
                self._commit(request_id, self._records[request_id])

    def batch_lost(self) -> None:
        """The last batch never reached the queue: what it should compute is never computed.

        Requests that it named cache nothing more: FastDeploy must preempt them, their tokens so far have a hole.
        """
        with self._lock:
            self._roll_back_unscheduled()
            for request_id in self._batch.close():
                self._records[request_id].has_hole = True
            if self.storage is not None:
                self.storage.batch_lost()
            if self._outbox.carries_copies:
                self._outbox.clear()
                self.batch_dropped()
            elif self._outbox.is_loaded:
                self._outbox.clear()
                self._outbox.restart()

    def host_copies_failed(self, results: Sequence[CopyResult]) -> None:
        """Workers say of these copies into the host tier that they failed: what they should hold is forgotten.

        Between two batches, when no request waits for a host block: a copy back that rode on a batch is the worker's.
        """
        with self._lock:
            self._roll_back_unscheduled()
            for result in results:
                self._prefixes_lost(self.manager.transfer_failed(result))

    def _prefixes_lost(self, request_ids: Sequence[str]) -> None:
        """Requests that use host blocks of which no batch has brought a copy."""
        assert not request_ids, f"requests {request_ids} wait for host blocks between two batches"

    def measured(self, prefills: Mapping[int, Sequence[PrefillTime]]) -> None:
        """What ranks say that passes took: it decides who waits for a store."""
        with self._lock:
            self._prefill_costs.computed_by_rank(prefills)

    def _roll_back_unscheduled(self) -> None:
        """2.6 without chunked prefill may stop after a match and keep it. Before it matches the request again, it asks
        whether the whole prompt fits, and the pinned blocks would count as taken: perhaps for ever.
        """
        for task in self._batch.matched():
            self._roll_back(task)

    def _roll_back(self, task: Any) -> None:
        self._forget(task.request_id)
        task.block_tables, task.num_cached_blocks = [], 0

    # ---- administration

    def use_storage(self, storage: EngineStorage) -> None:
        """It has the lock of this adapter."""
        with self._lock:
            storage.tier.weigh(self._prefill_costs.seconds)
            self.storage = storage

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        """Both tiers are empty, all ids free, no request known. There is no transfer process to wait for."""
        with self._lock:
            self._records.clear()
            if self.traced is not None:
                self.traced.all_ended()
            self._batch.clear()
            self._kept.clear()
            self._lent.clear()
            self.manager.reset_cache(force=True)
            self._restarted()
            self.hit_rates.reset()
            self._pool_gauges.publish_empty()

    def clearing(self, manager: Any) -> AbstractContextManager[None]:
        """While FastDeploy ends every request of its `manager` and drops what is queued for the workers."""
        return nullcontext()

    def batch_dropped(self, *, new_weights: bool = True) -> None:
        """FastDeploy dropped queued batches, or copies that rode on one: no cached block can be trusted.

        Requests keep their ids until FastDeploy takes them back.
        """
        with self._lock:
            self._batch.close()
            self.manager.reset_cache(new_weights=new_weights)
            self._restarted()

    def _restarted(self) -> None:
        self._outbox.restart()
        if self.storage is not None:
            self.storage.cache_reset()

    def update_cache_config(self, cache_config: Any) -> None:
        """Profiling found the number of device blocks. Raises `PoolInUseError` if ids above it are in use."""
        with self._lock:
            self.manager.resize_device_pool(int(cache_config.total_block_num))
            self._pool_gauges.publish_size()

    def check(self) -> None:
        """Raises `InvariantError`."""
        with self._lock:
            self.manager.check()
            self._kept.check()
            self._lent.check()
            scheduled = {request_id for request_id, record in self._records.items() if record.is_scheduled}
            self._batch.check(scheduled, self._records.keys() - scheduled)
            for request_id, record in self._records.items():
                if record.num_owned != self.manager.num_blocks(request_id):
                    raise InvariantError(f"adapter: request {request_id} has another table in the manager")
                if self.manager.num_cached(request_id) > record.num_computed:
                    raise InvariantError(f"adapter: blocks of request {request_id} are cached that no batch computes")

    # ---- FastDeploy's own calls for storage: blocks are stored as they reach the host tier, or by `_tell_ended`

    def write_cache_to_storage(self, request: Any) -> None:
        """Called for every finished request."""

    def write_cache_to_storage_decode(self, request: Any) -> None:
        """Called for every finished request of a decode instance, which we refuse to be."""

    def write_all_cache_to_storage(self, request: Any, include_output: bool = True) -> bool:
        return False

    def read_cache_from_storage_for_pd(self, request: Any) -> list[int]:
        return []
