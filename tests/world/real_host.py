"""FastDeploy's own ResourceManagerV1, of the release that this process imports, in place of the rules that are told.

Its thread pools are turns of the world. For a FastDeploy process only: tests/fastdeploy/inside/world.py runs in one.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.fastdeploy.real_manager import IS_26, make_manager, make_request

from .clients import Request
from .fastdeploy_host import LEAST_BLOCKS, FastDeployHost, LostError, Queue
from .memory import WrongError
from .ranks import Worker
from .reports import Reports
from .scenarios import SCENARIOS, fastdeploy, updating

LEAST = LEAST_BLOCKS + 2
"""FastDeploy refuses fewer blocks for requests that long."""


class Pool:
    """A ThreadPoolExecutor whose jobs are run by the world."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Any]] = deque()

    def submit(self, job: Any, *given: Any) -> Future[Any]:
        self.jobs.append((Future(), partial(job, *given)))
        return self.jobs[-1][0]

    def run(self, rng: random.Random | None = None) -> None:
        """One job, or all of them."""
        for _ in range(min(len(self.jobs), 1) if rng else len(self.jobs)):
            future, job = self.jobs.popleft()
            future.set_result(job())


class RealHost(FastDeployHost):
    """What it lacks it finds at its `manager`, as the patches do."""

    def __init__(self, world: Any, manager: Any, worker: Worker) -> None:
        self.world, self.manager, self.worker, self.is_26 = world, manager, worker, IS_26
        self.block_size = manager.config.cache_config.block_size
        self.queue, self.pool, self.loads = Queue(), Pool(), Pool()
        manager.finish_execution_pool, manager.async_preprocess_pool = self.pool, self.loads
        self.pausing, self._paused_at = "", 0.0
        self.count: Counter[str] = Counter()
        self._outside = deque()
        manager.cache_manager._give_up = self._given_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def _given_up(self, task: Any) -> None:
        self.count["given up"] += 1

    def task(self, request: Request, items: Any = None) -> Any:
        if request.image is not None:
            offset, length, content = request.image
            items = {"mm_positions": [SimpleNamespace(offset=offset, length=length)], "mm_hashes": [content]}
        elif self.world.faults.strike("garbled images", random.Random(f"{request.prompt}")):
            items = {"mm_positions": [None], "mm_hashes": ["h"]}
        task = make_request(request.request_id, request.prompt, items)
        task.uid, task.prompt, task.max_tokens = request.uid, request.tokens(), request.max_tokens
        task.cache_salt = request.salt
        task.skip_reading_prefix_cache = None if request.reads else True
        task.skip_writing_prefix_cache = None if request.writes else True
        return task

    def add_request(self, task: Any) -> None:
        self.manager.add_request(task)

    def abort(self, request_id: str) -> None:
        self.manager.add_abort_req_ids(request_id)

    # ---- the schedule loop

    def schedule_batch(self, raises_at: int) -> Any:
        """A loss is raised where FastDeploy looks how much of a prompt it computes."""
        look = self.manager._get_num_new_tokens

        def raising(*given: Any) -> Any:
            nonlocal raises_at
            tokens = look(*given)
            raises_at -= 1
            if raises_at == -1:
                raise LostError("lost in schedule")
            return tokens

        self.manager._get_num_new_tokens = raising
        try:
            tasks, errors = self.manager.schedule()
        finally:
            del self.manager._get_num_new_tokens
        assert not errors, errors
        return tasks

    def _put(self, tasks: Any, lost: str) -> None:
        self._name(tasks)
        super()._put(tasks, lost)

    def preempted_all(self) -> Any:
        return self._name(self.manager.preempted_all())

    def _name(self, tasks: Any) -> Any:
        """Whose rows they end: FastDeploy's tasks tell ids, which come again, and 2.5 tells of some that have ended."""
        for task in tasks:
            if task.task_type.name in ("PREEMPTED", "ABORT"):
                task.uid = getattr(self.manager.requests.get(task.request_id), "uid", None)
        return tasks

    # ---- the reader of tokens

    def take_tokens(self, rng: random.Random) -> None:
        self.pool.run()  # no request ends so late that its row is told to be free before
        super().take_tokens(rng)

    def reschedule_preempt_task(self, request_id: str) -> None:
        self.count["preempted"] += request_id in self.manager.to_be_rescheduled_request_id_set
        self.manager.reschedule_preempt_task(request_id)

    def recycle_abort_task(self, request_id: str) -> None:
        task = self.manager.requests[request_id]
        self.manager.recycle_abort_task(request_id)
        self.world.clients.ended(task.uid, "aborted")

    def _take_token(self, task: Any, token: int, root: Any) -> None:
        if task.status.name == "RUNNING_PREFILL":
            task.status = type(task.status).RUNNING_DECODE
        task.output_token_ids.append(token)
        self.world.clients.token(task.uid, token, root, self.world.tags)
        if len(task.output_token_ids) == task.max_tokens:
            self.manager.cache_output_tokens(task)
            self.manager.finish_requests_async(task.request_id)
            self.world.clients.ended(task.uid, "finished")

    def finish(self, task: Any) -> None:
        self.manager.finish_requests(task.request_id)

    # ---- laws

    def check(self) -> None:
        super().check()
        if self.count["given up"]:
            raise WrongError("a request could not be matched")

    def check_idle(self) -> None:
        super().check_idle()
        counters = self.manager.cache_manager.manager.stats().counters
        self.count["found on device"] += counters.device_hit_tokens
        self.count["found on host"] += counters.host_hit_tokens
        self.count["waited for a prefill"] += counters.shared_prefill_requests

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self.pool.jobs and not self.loads.jobs

    @property
    def events(self) -> list[Any]:
        ours = [(weight / 4 if event == self.pause else weight, event) for weight, event in super().events]
        return [*ours, (10, self.pool.run), (8, self.loads.run), (20, self.turn)]

    def turn(self, rng: random.Random) -> None:
        """As if nothing were late."""
        for part in (self.schedule, self.take, self.run, self.worker.run_devices, self.take_tokens):
            part(rng)


def make_host(
    world: Any, rng: random.Random, worker: Worker, reports: Reports, config: Any, device: int, *,
    backend: str, max_tokens: int, **options: Any,
) -> RealHost:  # fmt: skip
    """Without a store one in five has no prefix caching."""
    manager = make_manager(
        device, config.num_host_blocks, config.write_policy.value, threshold=config.write_through_threshold,
        block_size=config.block_size, caching=bool(backend) or rng.random() < 0.8, order=config.eviction_policy,
        whole_items=rng.random() < 0.5, max_tokens=min(max_tokens, 16 * config.block_size), **options,
    )  # fmt: skip
    manager.cache_manager.reports = reports
    manager.cache_manager._batch.prefills._worth_tokens = config.shared_prefill_tokens
    if backend:
        manager.config.cache_config.kvcache_storage_backend = backend
    return RealHost(world, manager, worker)


real = partial(fastdeploy, make=make_host, least=LEAST)

SCENARIOS |= {
    "real": real,
    "real updates": partial(updating, make=real),
    "real file": partial(real, backend="file"),
    "real attention_store": partial(real, backend="attention_store"),
}
