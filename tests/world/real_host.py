"""FastDeploy's own ResourceManagerV1, of the release that this process imports, in place of the rules that are told.

Its thread pools are turns of the world. For a FastDeploy process only: tests/fastdeploy/inside/world.py runs in one.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

from tests.fastdeploy.real_manager import IS_26, make_manager, make_request

from .clients import Request
from .fastdeploy_host import LEAST_BLOCKS, FastDeployHost
from .memory import WrongError
from .ranks import Reports, Worker
from .resource_manager import ask, images_of
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
    def __init__(self, world: Any, manager: Any, worker: Worker) -> None:
        super().__init__(world, manager, worker, is_26=IS_26)
        self.pool, self.loads = Pool(), Pool()
        manager.finish_execution_pool, manager.async_preprocess_pool = self.pool, self.loads
        self.cache_manager._give_up = lambda task: self.count.update(["given up"])

    def task(self, request: Request, items: Any = None) -> Any:
        items = images_of(request) or items
        if items is None and self.world.faults.strike("garbled images", random.Random(f"{request.prompt}")):
            items = {"mm_positions": [None], "mm_hashes": ["h"]}
        return ask(make_request(request.request_id, request.prompt, items), request)

    def take_tokens(self, rng: random.Random) -> None:
        self.pool.run()  # no request ends so late that its row is told to be free before
        super().take_tokens(rng)

    # ---- laws

    def check(self) -> None:
        super().check()
        if self.count["given up"]:
            raise WrongError("a request could not be matched")

    def check_idle(self) -> None:
        super().check_idle()
        counters = self.cache_manager.manager.stats().counters
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
