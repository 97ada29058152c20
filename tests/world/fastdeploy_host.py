"""FastDeploy's engine by the rules of its releases 2.5 and 2.6, over the real adapter and the real patches.

What it does is the host's: it inserts blocks in the tree when it schedules, frees a match that it does not schedule,
preempts the last one, counts seats as its release does, and goes on after a batch that was lost in any of four places.
Nothing waits: `schedule`, the queue, the workers' passes, and the reader of their tokens are turns of the world.
"""

from __future__ import annotations

import enum
import pickle
import random
import threading
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.errors import PoolInUseError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches, seats
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.adapter import PrefixCacheAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.followers import Followers
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.lost_batches import Transit
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.same_id import HeldBack
from fastdeploy_kvcache_v1.fastdeploy_integration.task_kind import TaskKind as Kind

from .clients import Request
from .memory import WrongError
from .ranks import RELEASED, Worker

PAUSE_S = 5.0
"""How long 2.5 waits for workers to confirm what it preempted: for ever where a batch that said so was lost."""

LEAST_BLOCKS = 16
"""With fewer the longest request does not fit."""


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    RUNNING_PREFILL = 2
    RUNNING_DECODE = 3
    PREEMPTED = 4
    FINISHED = 5


class LostError(Exception):
    """A batch is lost."""


class Task:
    """What is used of FastDeploy's Request. Equal, as there, to those of its id."""

    def __init__(self, request: Request) -> None:
        self.request_id, self.uid = request.request_id, request.uid
        self.prompt, self.prompt_token_ids = request.tokens(), list(request.prompt)
        self.output_token_ids: list[int] = []
        self.max_tokens = request.max_tokens
        self.cache_salt = request.salt
        self.skip_reading_prefix_cache = None if request.reads else True
        self.skip_writing_prefix_cache = None if request.writes else True
        self.multimodal_inputs: Any = None
        if request.image is not None:
            offset, length, content = request.image
            position = SimpleNamespace(offset=offset, length=length)
            self.multimodal_inputs = {"mm_positions": [position], "mm_hashes": [content]}
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


class Gauges:
    """FastDeploy's metrics: nobody looks at them here."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(set=lambda value: None)


class EngineCache(patches.EnginePrefixCache):
    """As FastDeploy's engine has it, without a configuration of FastDeploy's and without sockets."""

    def __init__(self, config: KVCacheConfig, *, reports: Any) -> None:
        PrefixCacheAdapter.__init__(self, config, gauges=Gauges(), whole_items=True)
        self.publisher: Any = SimpleNamespace(publish=lambda: None, publish_now=lambda: None)
        self.transit, self.followers = Transit(self), Followers(self)
        self.held_back = HeldBack(lambda request_id: self.storage is not None and self.storage.holds(request_id))
        self.arrivals = threading.Lock()
        self.reports, self.updates, self.epoch = reports, None, 0


class Queue:
    """One batch at a time, pickled when it is put."""

    def __init__(self) -> None:
        self.batch: bytes | None = None
        self.breaks = ""

    def exist_tasks(self) -> bool:
        return self.batch is not None

    def put_tasks(self, tasks: Any) -> None:
        if self.batch is not None:
            raise WrongError("the queue would wait for the worker")
        if self.breaks == "lost in put":
            raise LostError(self.breaks)
        self.batch = pickle.dumps(list(tasks[0]))
        if self.breaks == "lost after put":
            raise LostError(self.breaks)


class FastDeployHost:
    """`release`: 25 or 26."""

    batch: tuple[Any, ...] = ()
    """The last one."""

    def __init__(
        self, world: Any, cache: EngineCache, worker: Worker, *, release: int, seats: int, budget: int
    ) -> None:
        self.world, self.cache_manager, self.worker = world, cache, worker
        self.is_26, self.max_num_seqs, self.budget = release == 26, seats, budget
        self.block_size = cache.manager.config.block_size
        self.queue = Queue()
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
        self.pausing, self._paused_at = "", 0.0
        self.count: Counter[str] = Counter()
        self._outside: deque[Task] = deque()
        """Requests that come while the engine is paused."""
        self._raises_at = -1

    # ---- what clients ask for

    def add(self, request: Request) -> None:
        task = self.task(request)
        if self.pausing:
            self._outside.append(task)
        else:
            self.add_request(task)

    def task(self, request: Request) -> Any:
        return Task(request)

    def add_request(self, task: Any) -> None:
        patches.add_request(self._add_request, self, (task,), {})

    def _add_request(self, task: Task) -> None:
        with self.lock:
            self.waiting.append(task)
            self.requests[task.request_id] = task

    def abort(self, request_id: str) -> None:
        self.waiting_abort_req_id_set.add(request_id)

    # ---- the schedule loop

    def schedule(self, rng: random.Random) -> None:
        strike = [name for name in LOSSES if self.world.faults.strike(name, rng)]
        lost, passed = (strike or [""])[0], rng.randrange(4)
        if self.queue.exist_tasks() or self.pausing == "paused":
            return
        try:
            tasks = self.schedule_batch(passed if lost == "lost in schedule" else -1)
            self.world.log("schedule", *(f"{t.task_type.name} {t.request_id}@{t.idx}" for t in tasks))
            if tasks:
                self._put(tasks, lost)
        except LostError as error:
            self.count[str(error)] += 1
            self.world.log(str(error))

    def schedule_batch(self, raises_at: int) -> Any:
        """It is lost behind so many prompts, if that is not negative."""
        self._raises_at = raises_at
        wrapper = seats.schedule_with_a_seat if self.is_26 else patches.schedule
        return wrapper(partial(schedule, self), self, (), {})[0]

    def _put(self, tasks: Any, lost: str) -> None:
        self.batch = tuple(tasks)
        if lost == "lost before put":
            raise LostError(lost)
        self.queue.breaks = lost
        try:
            patches.put_tasks(self.queue.put_tasks, self.queue, ((tasks, len(tasks)),), {})
        finally:
            self.queue.breaks = ""

    def num_new_tokens(self, task: Task) -> int:
        if self._raises_at == 0:
            raise LostError("lost in schedule")
        self._raises_at -= 1
        return min(self.tokens_left, task.need_prefill_tokens - task.num_computed_tokens)

    def _is_decoding(self, task: Task) -> bool:
        return task.num_computed_tokens >= task.need_prefill_tokens

    def _schedule_running(self, batch: list[Any]) -> tuple[bool, bool]:
        """Whether it preempted, and whether a chunk found no blocks."""
        preempted: list[Task] = []
        aborted, short, index = [], False, 0
        while index < len(self.running) and self.tokens_left > 0:
            task = self.running[index]
            index += 1
            if self._is_decoding(task):
                if task.num_total_tokens > task.need_prefill_tokens:
                    task.num_computed_tokens = task.num_total_tokens - 1
                if task.request_id in self.waiting_abort_req_id_set:
                    self._trigger_abort(task, batch)
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
            tokens = self.num_new_tokens(task)
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
            victim = self._victim()
            if victim is None:
                return False
            self.running = [each for each in self.running if each is not victim]
            preempted.append(victim)
            batch.append(self._preempt(victim))
            victim.num_cached_blocks = 0
            if victim is task:
                return False
        return True

    def _victim(self) -> Task | None:
        """2.6 preempts what decodes, 2.5 anything; both the last one."""
        for task in reversed(self.running):
            if not self.is_26 or task.status is Status.RUNNING_DECODE:
                return task
        return None

    def _preempt(self, task: Task) -> Control:
        task.status, task.num_computed_tokens = Status.PREEMPTED, 0
        self._free_blocks(task)
        self.to_be_rescheduled_request_id_set.add(task.request_id)
        return self._prepare_preempt_task(task)

    def _trigger_abort(self, task: Task, batch: list[Any]) -> None:
        task.status, task.num_computed_tokens = Status.PREEMPTED, 0
        self._free_blocks(task)
        batch.append(Control(Kind.ABORT, task))
        self.to_be_aborted_req_id_set.add(task.request_id)
        self.waiting_abort_req_id_set.discard(task.request_id)

    def _seats_are_taken(self) -> bool:
        if not self.is_26:
            return len(self.running) == self.max_num_seqs
        unconfirmed = len(self.to_be_rescheduled_request_id_set) + len(self.to_be_aborted_req_id_set)
        waiting = sum(task.status is Status.PREEMPTED for task in self.waiting)
        return len(self.running) + unconfirmed + waiting >= self.max_num_seqs

    def admit(self, task: Task, batch: list[Any]) -> bool:
        """False: nobody behind it is looked at."""
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
        tokens = self.num_new_tokens(task)
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
        except Exception:  # as the host
            return False
        found = metrics["gpu_match_token_num"] + metrics["cpu_match_token_num"]
        if found != matched or (task.skip_reading_prefix_cache and matched):
            raise WrongError(f"{task.request_id} matches {matched} tokens, its metrics say {found}")
        task.block_tables, task.num_computed_tokens = table, matched
        return True

    def _new_blocks(self, task: Task, tokens: int) -> int:
        return -(-(task.num_computed_tokens + tokens) // self.block_size) - len(task.block_tables)

    def _prefill(self, task: Task, tokens: int, blocks: int, batch: list[Any]) -> None:
        task.block_tables.extend(self.cache_manager.allocate_gpu_blocks(blocks, task.request_id))
        task.prefill_start_index = task.num_computed_tokens
        task.prefill_end_index = task.num_computed_tokens + tokens
        task.num_computed_tokens += tokens
        self.tokens_left -= tokens
        batch.append(task)
        self.cache_manager.update_cache_blocks(task, self.block_size, task.num_computed_tokens)

    def _free_blocks(self, task: Task) -> None:
        self.cache_manager.release_block_ids(task)
        self.cache_manager.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
        task.block_tables = []

    def _prepare_preempt_task(self, task: Task) -> Control:
        return Control(Kind.PREEMPTED, task)

    def preempted_all(self) -> Any:
        tasks = []
        while self.running:
            tasks.append(self._preempt(self.running.pop()))
        return tasks

    def reschedule_preempt_task(self, request_id: str) -> None:
        if request_id in self.to_be_rescheduled_request_id_set and request_id in self.requests:
            self.waiting.appendleft(self.requests[request_id])
            self.to_be_rescheduled_request_id_set.remove(request_id)
            self.count["preempted"] += 1

    def recycle_abort_task(self, request_id: str) -> None:
        if request_id in self.to_be_aborted_req_id_set and request_id in self.requests:
            task = self.requests[request_id]
            self._leave(task)
            self.to_be_aborted_req_id_set.discard(request_id)
            self.waiting_abort_req_id_set.discard(request_id)
            self.world.clients.ended(task.uid, "aborted")

    def _leave(self, task: Task) -> None:
        assert task.idx is not None
        self.tasks_list[task.idx], self.stop_flags[task.idx] = None, True
        del self.requests[task.request_id]
        self.req_dict.pop(task.request_id, None)

    # ---- the reader of tokens

    def take_tokens(self, rng: random.Random) -> None:
        message = self.worker.message()
        for index, (token, uid, root) in sorted((message or {}).items()):
            task = self.tasks_list[index]
            if self.stop_flags[index] or task is None or task.uid != uid:
                self.count["stray"] += 1
            elif token is RELEASED:
                if task.request_id in self.to_be_aborted_req_id_set:
                    self.recycle_abort_task(task.request_id)
                else:
                    self.reschedule_preempt_task(task.request_id)
            else:
                self._take_token(task, token, root)

    def _take_token(self, task: Task, token: int, root: Any) -> None:
        if task.status is Status.RUNNING_PREFILL:
            task.status = Status.RUNNING_DECODE
        task.output_token_ids.append(token)
        self.world.clients.token(task.uid, token, root, self.world.tags)
        if len(task.output_token_ids) == task.max_tokens:
            self.cache_manager.cache_output_blocks(task, self.block_size)
            self.finish(task)
            self.world.clients.ended(task.uid, "finished")

    def finish(self, task: Task) -> None:
        is_running = any(each is task for each in self.running)
        self.running = [each for each in self.running if each is not task]
        if is_running:
            task.status = Status.FINISHED
        self.to_be_rescheduled_request_id_set.discard(task.request_id)
        self._leave(task)
        self.waiting_abort_req_id_set.discard(task.request_id)
        if self.is_26:
            self.to_be_aborted_req_id_set.discard(task.request_id)
        if is_running:
            self.cache_manager.write_cache_to_storage(task)
            self._free_blocks(task)

    # ---- administration

    def pause(self, rng: random.Random) -> None:
        """A reset in the way of the release."""
        if self.pausing:
            return
        if self.is_26:  # everything is aborted, and the cache is emptied when nothing runs
            self.pausing = "aborting"
            for task in self.running:
                self.world.clients.aborted.add(task.request_id)
                self.abort(task.request_id)
        elif not self.queue.exist_tasks():
            self.pausing, self._paused_at = "paused", self.world.clock()
            tasks = self.preempted_all()
            if tasks:
                self.queue.put_tasks((tasks, len(tasks)))

    def go_on_pausing(self, rng: random.Random) -> None:
        if not self.pausing or self.queue.exist_tasks():
            return
        if self.pausing == "paused" and self.to_be_rescheduled_request_id_set:
            if self.world.clock() - self._paused_at < PAUSE_S:
                return
            if not any(self.count[loss] for loss in LOSSES):
                raise WrongError("a pause ends by its time-out, and no batch was lost")
        num_inside = len(self.world.clients.requests) - len(self._outside)
        if self.pausing == "aborting" and (num_inside or not self.worker.is_idle):
            return
        self.cache_manager.reset()
        known = {task.uid for task in (*self.requests.values(), *self._outside)}
        for uid in [each for each in self.world.clients.requests if each not in known]:
            self.world.clients.ended(uid, "dropped")  # they waited outside FastDeploy, for their id or for the store
        if rng.random() < 0.3:
            self.world.weights += 1
            if self.cache_manager.storage is not None:
                self.cache_manager.storage.weights_changed()
        self.waiting_abort_req_id_set.clear()
        self.pausing = ""
        self.count["resets"] += 1
        outside, self._outside = self._outside, deque()
        for task in outside:
            self.add_request(task)

    def resize(self, rng: random.Random) -> None:
        """Profiling ends while the engine polls."""
        most, lot, drawn = self.world.sizes["device"], rng.random(), rng.random()
        size = most if lot < 0.5 else LEAST_BLOCKS + int(drawn * (most - LEAST_BLOCKS + 1))
        try:
            self.cache_manager.update_cache_config(SimpleNamespace(total_block_num=size))
        except PoolInUseError:
            self.count["refused resizes"] += 1

    # ---- laws

    def check(self) -> None:
        self.cache_manager.check()

    @property
    def progress(self) -> tuple[int, ...]:
        return len(self.world.clients.requests), self.worker.num_passes, self.count["preempted"]

    @property
    def is_idle(self) -> bool:
        return not self.world.clients.requests and not self.queue.exist_tasks() and not self.pausing

    def check_idle(self) -> None:
        self.cache_manager.manager.check_idle()
        if not all(self.stop_flags):
            raise WrongError("a seat leaks")

    def free_stuck(self) -> bool:
        """FastDeploy's own: unfinished prefills that hold all blocks wait for each other. One of them is ended."""
        if not self.running or any(self._is_decoding(each) for each in self.running):
            return False
        task = self.running[-1]
        self.worker.rows = {index: row for index, row in self.worker.rows.items() if row.uid != task.uid}
        self.finish(task)
        self.world.clients.ended(task.uid, "stuck")
        return True

    @property
    def events(self) -> list[Any]:
        """Weights and events; those of at least 5 go on by themselves."""
        return [
            (0.4 if self.cache_manager.storage is None else 1.0, self.pause),
            (0.3, self.resize),
            (5, self.go_on_pausing),
            (16, self.schedule),
            (12, self.take),
            (14, self.run),
            (16, self.worker.run_devices),
            (16, self.take_tokens),
        ]

    def take(self, rng: random.Random) -> None:
        if self.queue.batch is not None:
            batch, self.queue.batch = self.queue.batch, None
            self.worker.take(batch)

    def run(self, rng: random.Random) -> None:
        self.worker.run()


LOSSES = ("lost in schedule", "lost before put", "lost in put", "lost after put")


def schedule(host: FastDeployHost) -> tuple[list[Any], list[Any]]:
    """The name of the function and of two of its variables are what `lost_batches` looks for."""
    with host.lock:
        scheduled_reqs: list[Any] = []
        host.tokens_left = host.budget
        if host.is_26:
            host.tokens_left -= sum(host._is_decoding(each) for each in host.running)
        preempted, short = host._schedule_running(scheduled_reqs)
        skip_requests: list[Any] = []
        while host.waiting and host.tokens_left > 0 and not preempted and not short:
            if host._seats_are_taken():
                break
            task = host.waiting[0]
            if task.status is Status.WAITING and patches.waiting_async_process(lambda _: False, host, (task,), {}):
                skip_requests.append(host.waiting.popleft())
            elif not host.admit(task, scheduled_reqs):
                break
        host.waiting.extend(skip_requests)
        return scheduled_reqs, []
