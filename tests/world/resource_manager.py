"""FastDeploy's ResourceManagerV1 by the rules of its supported releases, over the real adapter and the real patches.

As in FastDeploy, it inserts blocks into the tree when it schedules, frees a match that it does not schedule, preempts
the last request, and counts seats as its release does.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import wrapt

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches, seats
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.adapter import PrefixCacheAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.followers import Followers
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.lost_batches import Transit
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.same_id import HeldBack
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import TaskKind as Kind

from .clients import Request
from .memory import WrongError

Status = enum.Enum("Status", "WAITING RUNNING RUNNING_PREFILL RUNNING_DECODE PREEMPTED FINISHED")


def images_of(request: Request) -> Any:
    """FastDeploy's fields for images, with one row of pixels."""
    if request.image is None:
        return None
    offset, length, content = request.image
    position, pixels = SimpleNamespace(offset=offset, length=length), np.array([[*content.encode()]], dtype="uint8")
    return {"mm_positions": [position], "mm_hashes": ["not read"], "images": pixels, "grid_thw": [[1, 1, 1]]}


def ask(task: Any, request: Request) -> Any:
    """Return `task` with the fields of the client's request beside the prompt."""
    task.uid, task.prompt, task.max_tokens = request.uid, request.tokens(), request.max_tokens
    task.cache_salt, task.session_id = request.salt, request.session
    task.return_in_s = request.return_in_s if request.uid % 7 else "soon"  # as `metadata` may bring it
    task.prompt_cache_key = task.user = None
    task.skip_reading_prefix_cache = None if request.reads else True
    task.skip_writing_prefix_cache = None if request.writes else True
    task.disable_prefix_caching = not (request.reads or request.writes)
    return task


class Task:
    """The used part of FastDeploy's Request. As there, tasks with the same id are equal."""

    def __init__(self, request: Request) -> None:
        ask(self, request)
        self.request_id, self.prompt_token_ids = request.request_id, list(request.prompt)
        self.output_token_ids: list[int] = []
        self.multimodal_inputs = images_of(request)
        self.block_tables: list[int] = []
        self.num_cached_blocks = self.num_computed_tokens = 0
        self.prefill_start_index = self.prefill_end_index = 0
        self.need_prefill_tokens = len(request.prompt)
        self.status, self.task_type, self.idx = Status.WAITING, Kind.PREFILL, None
        self.metrics = SimpleNamespace(arrival_time=0.0)

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and other.request_id == self.request_id

    @property
    def num_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class Control:
    """ScheduledDecodeTask and its siblings."""

    def __init__(self, kind: Kind, task: Task) -> None:
        self.task_type, self.idx, self.request_id, self.uid = kind, task.idx, task.request_id, task.uid
        self.block_tables = task.block_tables


class EngineCache(patches.EnginePrefixCache):
    """The engine's cache without a configuration of FastDeploy and without sockets."""

    def __init__(self, config: KVCacheConfig, *, reports: Any) -> None:
        PrefixCacheAdapter.__init__(self, config, gauges=Mock(), whole_items=True)
        self.publisher: Any = SimpleNamespace(publish=lambda: None, publish_now=lambda: None)
        self.transit, self.followers = Transit(self), Followers(self)
        self.held_back = HeldBack(lambda request_id: self.storage is not None and self.storage.holds(request_id))
        self.arrivals = threading.Lock()
        self.reports, self.updates, self.epoch = reports, None, 0


class ResourceManager:
    """`release`: 25 or 26."""

    def __init__(self, cache: EngineCache, *, release: int, seats: int, budget: int) -> None:
        self.cache_manager, self.is_26, self.max_num_seqs, self.budget = cache, release == 26, seats, budget
        self.block_size = cache.manager.config.block_size
        self.lock = threading.RLock()
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []
        self.requests: dict[str, Task] = {}
        self.req_dict: dict[str, int] = {}
        self.tasks_list: list[Task | None] = [None] * seats
        self.stop_flags = [True] * seats
        self.waiting_abort_req_id_set: set[str] = set()
        self.to_be_aborted_req_id_set: set[str] = set()
        self.to_be_rescheduled_request_id_set: set[str] = set()
        self.config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self.block_size),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=budget, splitwise_role="mixed"),
            speculative_config=SimpleNamespace(num_speculative_tokens=0),
        )

    @wrapt.decorator(patches.add_request)
    def add_request(self, task: Task) -> None:
        with self.lock:
            self.waiting.append(task)
            self.requests[task.request_id] = task

    def add_abort_req_ids(self, request_id: str) -> None:
        self.waiting_abort_req_id_set.add(request_id)

    def schedule(self) -> Any:
        def schedule() -> tuple[list[Any], list[Any]]:
            """`lost_batches` looks for the names of this function and of two of its variables."""
            with self.lock:
                scheduled_reqs: list[Any] = []
                self.tokens_left = self.budget
                if self.is_26:
                    self.tokens_left -= sum(map(self._is_decoding, self.running))
                preempted, short = self.schedule_running(scheduled_reqs)
                skip_requests: list[Any] = []
                while self.waiting and self.tokens_left > 0 and not (preempted or short or self.seats_are_taken()):
                    task = self.waiting[0]
                    if task.status is Status.WAITING and self.waiting_async_process(task):
                        skip_requests.append(self.waiting.popleft())
                    elif not self.admit(task, scheduled_reqs):
                        break
                self.waiting.extend(skip_requests)
                return scheduled_reqs, []

        return (seats.schedule_with_a_seat if self.is_26 else patches.schedule)(schedule, self, (), {})

    @wrapt.decorator(patches.waiting_async_process)
    def waiting_async_process(self, task: Task) -> bool:
        return False

    # ---- running requests

    def _get_num_new_tokens(self, task: Task, budget: int) -> int:
        return min(budget, task.need_prefill_tokens - task.num_computed_tokens)

    def _is_decoding(self, task: Task) -> bool:
        return task.num_computed_tokens >= task.need_prefill_tokens

    def schedule_running(self, batch: list[Any]) -> tuple[bool, bool]:
        """Return whether a request was preempted, and whether a chunk found no blocks."""
        preempted: list[Task] = []
        aborted, short, index = [], False, 0
        while index < len(self.running) and self.tokens_left > 0:
            task = self.running[index]
            index += 1
            if self._is_decoding(task):
                if task.num_total_tokens > task.need_prefill_tokens:
                    task.num_computed_tokens = task.num_total_tokens - 1
                if task.request_id in self.waiting_abort_req_id_set:
                    self.trigger_abort(task, batch)
                    aborted.append(task)
                    continue
                if len(task.block_tables) * self.block_size - task.num_total_tokens <= 1:
                    if not self._make_room(2, task, preempted, batch):
                        break
                    task.block_tables.extend(self.cache_manager.allocate_gpu_blocks(2, task.request_id))
                    batch.append(Control(Kind.DECODE, task))
                if not self.is_26:
                    self.tokens_left -= 1
                continue
            tokens = self._get_num_new_tokens(task, self.tokens_left)
            blocks = self._new_blocks(task, tokens)
            if self.is_26 and not self.cache_manager.can_allocate_gpu_blocks(blocks):
                short = True
                break
            if not self.is_26 and not self._make_room(blocks, task, preempted, batch):
                break
            self._prefill(task, tokens, blocks, batch)
        for task in aborted:
            self.running.remove(task)
        return bool(preempted), short

    def _make_room(self, blocks: int, task: Task, preempted: list[Task], batch: list[Any]) -> bool:
        while not self.cache_manager.can_allocate_gpu_blocks(blocks):
            # 2.6 preempts the last decoding request, 2.5 the last request
            may_go = (each for each in reversed(self.running) if not self.is_26 or each.status is Status.RUNNING_DECODE)
            if (victim := next(may_go, None)) is None:
                return False
            self.running = [each for each in self.running if each is not victim]
            preempted.append(victim)
            batch.append(self._preempt(victim))
            victim.num_cached_blocks = 0
            if victim is task:
                return False
        return True

    @wrapt.decorator(patches.preempted_all)
    def preempted_all(self) -> Any:
        return [self._preempt(self.running.pop()) for _ in range(len(self.running))]

    def _preempt(self, task: Task) -> Control:
        self._stop(task)
        self.to_be_rescheduled_request_id_set.add(task.request_id)
        return self._prepare_preempt_task(task)

    def _prepare_preempt_task(self, task: Task) -> Control:
        return Control(Kind.PREEMPTED, task)

    def trigger_abort(self, task: Task, batch: list[Any]) -> None:
        self._stop(task)
        batch.append(Control(Kind.ABORT, task))
        self.to_be_aborted_req_id_set.add(task.request_id)
        self.waiting_abort_req_id_set.discard(task.request_id)

    def _stop(self, task: Task) -> None:
        task.status, task.num_computed_tokens = Status.PREEMPTED, 0
        self._free_blocks(task)

    # ---- waiting requests

    def seats_are_taken(self) -> bool:
        if not self.is_26:
            return len(self.running) == self.max_num_seqs
        unconfirmed = len(self.to_be_rescheduled_request_id_set) + len(self.to_be_aborted_req_id_set)
        waiting = sum(task.status is Status.PREEMPTED for task in self.waiting)
        return len(self.running) + unconfirmed + waiting >= self.max_num_seqs

    def admit(self, task: Task, batch: list[Any]) -> bool:
        """Return False to stop at this request: those behind it stay in the queue."""
        if task.status is Status.PREEMPTED:
            task.need_prefill_tokens = task.num_total_tokens
        cache, needed = self.cache_manager, -(-task.need_prefill_tokens // self.block_size)
        is_tiered = cache.num_cpu_blocks > 0 or cache.storage is not None
        if is_tiered and not cache.can_allocate_gpu_blocks(needed):
            return False
        in_turn = patches.get_prefix_cached_blocks_in_turn if self.is_26 else seats.get_prefix_cached_blocks
        if not in_turn(self._match, self, (task,), {}):
            self._free_blocks(task)
            return False
        tokens = self._get_num_new_tokens(task, self.tokens_left)
        blocks = threshold = self._new_blocks(task, tokens)
        if not self.is_26:
            threshold = seats.blocks_to_start(lambda _, number: number, self, (task, blocks), {})
        if not cache.can_allocate_gpu_blocks(threshold):
            self._free_blocks(task)
            return False
        self.waiting.popleft()
        self.running.append(task)
        self._prefill(task, tokens, blocks, batch)
        if task.status is Status.WAITING:
            task.idx = self.stop_flags.index(True)
            self.tasks_list[task.idx], self.stop_flags[task.idx] = task, False
            self.req_dict[task.request_id] = task.idx
        task.status = Status.RUNNING_PREFILL if self.is_26 else Status.RUNNING
        return True

    def _match(self, task: Task) -> bool:
        try:
            table, matched, metrics = self.cache_manager.request_match_blocks(task, self.block_size)
        except WrongError:
            raise
        except Exception:  # as FastDeploy does
            return False
        found = sum(metrics[f"{tier}_match_token_num"] for tier in ("gpu", "cpu", "storage"))
        if found != matched or (task.skip_reading_prefix_cache and matched):
            raise WrongError(f"{task.request_id} matches {matched} tokens, its metrics say {found}")
        task.block_tables, task.num_computed_tokens = table, matched
        task.storage_cache_token_num = metrics["storage_match_token_num"]
        return True

    def _new_blocks(self, task: Task, tokens: int) -> int:
        return -(-(task.num_computed_tokens + tokens) // self.block_size) - len(task.block_tables)

    def _prefill(self, task: Task, tokens: int, blocks: int, batch: list[Any]) -> None:
        task.block_tables.extend(self.cache_manager.allocate_gpu_blocks(blocks, task.request_id))
        task.prefill_start_index = task.num_computed_tokens
        task.prefill_end_index = task.num_computed_tokens = task.num_computed_tokens + tokens
        self.tokens_left -= tokens
        batch.append(task)
        self.cache_manager.update_cache_blocks(task, self.block_size, task.num_computed_tokens)

    def _free_blocks(self, task: Task) -> None:
        self.cache_manager.release_block_ids(task)
        self.cache_manager.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
        task.block_tables = []

    # ---- messages of the workers

    @wrapt.decorator(patches.reschedule_preempt_task)
    def reschedule_preempt_task(self, request_id: str) -> None:
        if request_id in self.to_be_rescheduled_request_id_set and request_id in self.requests:
            self.waiting.appendleft(self.requests[request_id])
            self.to_be_rescheduled_request_id_set.remove(request_id)

    def recycle_abort_task(self, request_id: str) -> None:
        self._leave(self.requests[request_id])
        self.to_be_aborted_req_id_set.discard(request_id)

    def cache_output_tokens(self, task: Task) -> None:
        self.cache_manager.cache_output_blocks(task, self.block_size)

    def finish_requests(self, request_id: str) -> None:
        task = self.requests[request_id]
        self.to_be_rescheduled_request_id_set.discard(request_id)
        self._leave(task)
        if self.is_26:
            self.to_be_aborted_req_id_set.discard(request_id)
        if any(each is task for each in self.running):
            self.running = [each for each in self.running if each is not task]
            task.status = Status.FINISHED
            self.cache_manager.write_cache_to_storage(task)
            self._free_blocks(task)

    finish_requests_async = finish_requests

    def pre_recycle_resource(self, request_id: str) -> None:
        """Called when the request fails."""
        if task := self.requests.get(request_id):
            self._leave(task)
            self._free_blocks(task)

    def _leave(self, task: Task) -> None:
        assert task.idx is not None
        self.tasks_list[task.idx], self.stop_flags[task.idx] = None, True
        del self.requests[task.request_id]
        self.req_dict.pop(task.request_id, None)
        self.waiting_abort_req_id_set.discard(task.request_id)
