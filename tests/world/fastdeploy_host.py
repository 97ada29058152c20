"""FastDeploy's engine around its resource manager. A batch may be lost in four places, and the engine goes on.

Nothing blocks: `schedule`, the queue, the workers' passes and the reader of their tokens are events of the world.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fastdeploy_kvcache_v1.contract.sessions import SessionHint
from fastdeploy_kvcache_v1.errors import PoolInUseError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches

from .clients import Request
from .memory import WrongError
from .ranks import RELEASED, Worker
from .resource_manager import Task

PAUSE_S = 5.0
"""A pause of 2.5 waits until workers confirm each preemption: for ever if the batch with it was lost."""

LEAST_BLOCKS = 16
"""The longest request needs so many."""

LOSSES = ("lost in schedule", "lost before put", "lost in put", "lost after put")


class LostError(Exception):
    """A batch is lost."""


class Queue:
    """A queue for one batch, which is pickled when it is put."""

    def __init__(self) -> None:
        self.batch: bytes | None = None

    def exist_tasks(self) -> bool:
        return self.batch is not None

    def put_tasks(self, tasks: Any, lost: str = "") -> None:
        if self.batch is not None:
            raise WrongError("the queue would wait for the worker")
        if lost == "lost in put":
            raise LostError(lost)
        self.batch = pickle.dumps(list(tasks[0]))
        if lost == "lost after put":
            raise LostError(lost)


class FastDeployHost:
    """`manager` is a ResourceManagerV1: by rules (`resource_manager.py`), or FastDeploy's own."""

    batch: tuple[Any, ...] = ()
    """The last batch."""
    task: Any = staticmethod(Task)
    """Makes FastDeploy's request from a client's."""

    def __init__(self, world: Any, manager: Any, worker: Worker, *, is_26: bool) -> None:
        self.world, self.manager, self.worker, self.is_26 = world, manager, worker, is_26
        self.cache_manager, self.abort = manager.cache_manager, manager.add_abort_req_ids
        self.block_size = manager.config.cache_config.block_size
        self.queue = Queue()
        self.pausing, self._paused_at = "", 0.0
        self.count: Counter[str] = Counter()
        self._outside: deque[Any] = deque()
        """Requests that arrive while the engine is paused."""

    # ---- called by clients

    def add(self, request: Request) -> None:
        task = self.task(request)
        if self.pausing:
            self._outside.append(task)
        else:
            self.manager.add_request(task)

    def tell(self, session: SessionHint) -> None:
        self.count["told"] += self.cache_manager.manager.tell_return(session)

    # ---- the schedule loop

    def schedule(self, rng: random.Random) -> None:
        drawn = [name for name in LOSSES if self.world.faults.draw(name, rng)]
        lost, passed = (drawn or [""])[0], rng.randrange(4)
        if self.queue.exist_tasks() or self.pausing == "paused":
            return
        try:
            tasks = self._schedule(passed if lost == "lost in schedule" else -1)
            if tasks:
                named = (f"{each.task_type.name.lower()} {each.request_id} in seat {each.idx}" for each in tasks)
                self.world.log("batch:", ", ".join(named))
                self._put(tasks, lost)
        except LostError as error:
            self.count[str(error)] += 1
            self.world.faults.injected(str(error))

    def _schedule(self, raises_at: int) -> Any:
        """Schedule. Raise `LostError` after `raises_at` prompts were scheduled; never, if it is negative."""
        look = self.manager._get_num_new_tokens

        def raising(*given: Any) -> Any:
            nonlocal raises_at
            tokens = look(*given)
            raises_at -= 1
            if raises_at == -1:
                raise LostError("lost in schedule")
            return tokens

        with patch.object(self.manager, "_get_num_new_tokens", raising):
            tasks, errors = self.manager.schedule()
        assert not errors, errors
        return tasks

    def _put(self, tasks: Any, lost: str) -> None:
        self.batch = tuple(self._name(tasks))
        if lost == "lost before put":
            raise LostError(lost)
        patches.put_tasks(partial(self.queue.put_tasks, lost=lost), self.queue, ((tasks, len(tasks)),), {})

    def _name(self, tasks: Any) -> Any:
        """Add the `uid` to each task: FastDeploy's ids may be used again, and 2.5 sends tasks of ended requests."""
        for task in tasks:
            if not hasattr(task, "uid"):
                task.uid = getattr(self.manager.requests.get(task.request_id), "uid", None)
        return tasks

    # ---- the reader of tokens

    def take_tokens(self, rng: random.Random) -> None:
        manager, message = self.manager, self.worker.message()
        for index, (token, uid, root) in sorted((message or {}).items()):
            task = manager.tasks_list[index]
            if manager.stop_flags[index] or task is None or task.uid != uid:
                self.count["stray"] += 1
            elif token is not RELEASED:
                self._take_token(task, token, root)
            elif task.request_id in manager.to_be_aborted_req_id_set:
                manager.recycle_abort_task(task.request_id)
                self.world.clients.ended(task.uid, "aborted")
            else:
                self.count["preempted"] += task.request_id in manager.to_be_rescheduled_request_id_set
                manager.reschedule_preempt_task(task.request_id)

    def _take_token(self, task: Any, token: int, root: Any) -> None:
        if task.status.name == "RUNNING_PREFILL":
            task.status = type(task.status).RUNNING_DECODE
        task.output_token_ids.append(token)
        self.world.clients.token(task.uid, token, root, self.world.tags)
        if len(task.output_token_ids) == task.max_tokens:
            self.manager.cache_output_tokens(task)
            self.manager.finish_requests_async(task.request_id)
            self.world.clients.ended(task.uid, "finished")

    # ---- administration

    def pause(self, rng: random.Random) -> None:
        """Pause and reset, as the release does it."""
        if self.pausing:
            return
        if self.is_26:  # 2.6 aborts everything, and resets the cache when nothing runs
            self.pausing = "aborting"
            for task in self.manager.running:
                self.world.clients.aborted.add(task.request_id)
                self.abort(task.request_id)
        elif not self.queue.exist_tasks():
            self.pausing, self._paused_at = "paused", self.world.clock()
            tasks = self._name(self.manager.preempted_all())
            if tasks:
                self.queue.put_tasks((tasks, len(tasks)))

    def go_on_pausing(self, rng: random.Random) -> None:
        if not self.pausing or self.queue.exist_tasks():
            return
        if self.pausing == "paused" and self.manager.to_be_rescheduled_request_id_set:
            if self.world.clock() - self._paused_at < PAUSE_S or self.worker.has_passes:
                return
            if not any(self.count[loss] for loss in LOSSES):
                raise WrongError("a pause ends by its timeout, and no batch was lost")
        num_inside = len(self.world.clients.requests) - len(self._outside)
        if self.pausing == "aborting" and (num_inside or not self.worker.is_idle):
            return
        self.cache_manager.reset()
        known = {task.uid for task in (*self.manager.requests.values(), *self._outside)}
        for uid in [each for each in self.world.clients.requests if each not in known]:
            self.world.clients.ended(uid, "dropped")  # waited outside FastDeploy, for its id or for the store
        if rng.random() < 0.3:
            self.world.weights += 1
            if self.cache_manager.storage is not None:
                self.cache_manager.storage.weights_changed()
        self.manager.waiting_abort_req_id_set.clear()
        self.pausing = ""
        self.count["resets"] += 1
        outside, self._outside = self._outside, deque()
        for task in outside:
            self.manager.add_request(task)

    def resize(self, rng: random.Random) -> None:
        """Profiling ends, and gives the device tier its size."""
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
        if not all(self.manager.stop_flags):
            raise WrongError("a seat leaks")

    def free_stuck(self) -> bool:
        """End one of several unfinished prefills that hold all blocks: FastDeploy lets them wait for each other."""
        running = self.manager.running
        if not running or any(each.num_computed_tokens >= each.need_prefill_tokens for each in running):
            return False
        task = running[-1]
        self.worker.rows = {index: row for index, row in self.worker.rows.items() if row.uid != task.uid}
        self.manager.finish_requests(task.request_id)
        self.world.clients.ended(task.uid, "stuck")
        return True

    @property
    def events(self) -> list[Any]:
        """Weights and events. Events with a weight of at least 5 also run in `settle`."""
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
