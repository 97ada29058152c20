"""FastDeploy's own ResourceManagerV1 in place of `resource_manager.py`: alone, or as prefill and decode server.

Its thread pools are events of the world. It needs a process with FastDeploy: tests/fastdeploy/inside/world.py.

Between the roles travel requests for room, blocks and first tokens. The parts below the adapters are modelled by their
contract: a fetch fills its slots in any order after the worker has the batch that it waits for, holds garbage until
then, and ends once. Blocks of prefill are read at the last moment, so a block that it gives away early is noticed.
"""

from __future__ import annotations

import os
import pickle
import random
import tempfile
from collections import Counter, deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SwapInbox
from tests.fastdeploy.real_manager import IS_26, make_manager, make_request

from .chance import pick
from .clients import Clients, Request
from .fastdeploy_host import LEAST_BLOCKS, FastDeployHost
from .memory import WrongError
from .ranks import OWN_NOTHING, Reports, Worker
from .resource_manager import ask, images_of
from .roles import Between
from .scenarios import SCENARIOS, fastdeploy, make_worker, updating

_secret = Path(tempfile.mkdtemp()) / "secret"
_secret.write_text("0123456789abcdef")
_secret.chmod(0o600)
os.environ["FASTDEPLOY_KVCACHE_PEER_SECRET_FILE"] = str(_secret)
os.environ["FASTDEPLOY_KVCACHE_CPU_RUN"] = str(_secret.parent)

from fastdeploy.engine.request import CompletionOutput, RequestMetrics, RequestOutput  # noqa: E402
from fastdeploy.engine.request import Request as Task  # noqa: E402

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import role_caches  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.first_tokens import FirstTokens  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import RankNews  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.settings import RankPlace  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import name_of  # noqa: E402

role_caches.place_of = lambda config: RankPlace("127.0.0.1", (1,), "a model")

LEAST = LEAST_BLOCKS + 2
"""FastDeploy refuses fewer blocks for requests of this length."""


class Pool:
    """A ThreadPoolExecutor whose jobs the world runs."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Any]] = deque()

    def submit(self, job: Any, *given: Any) -> Future[Any]:
        self.jobs.append((Future(), partial(job, *given)))
        return self.jobs[-1][0]

    def run(self, rng: random.Random | None = None) -> None:
        """Run one job, or all of them without `rng`."""
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
        """Run every part once, so that nothing is late."""
        for part in (self.schedule, self.take, self.run, self.worker.run_devices, self.take_tokens):
            part(rng)


def make_host(
    world: Any, rng: random.Random, worker: Worker, reports: Reports, config: Any, device: int, *,
    backend: str, max_tokens: int, **options: Any,
) -> RealHost:  # fmt: skip
    """Make a host. Without a store one in five has no prefix caching."""
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


# ---- roles

END = 0
"""A token that ends a request and that no worker samples."""


class RoleWorker(Worker):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._inbox, self.last_step = SwapInbox(), -1
        self.offers: dict[str, list[int]] = {}
        """Tables that decode may read, by name of the transfer, each offered once; empty of a request that was given
        up.
        """
        self._names: dict[str, str] = {}

    def take(self, batch: bytes) -> None:
        tasks = pickle.loads(batch)
        self.last_step = max([self.last_step, *(each.step for each in self._inbox.take(tasks))])
        for task in tasks:
            if task.task_type.name in ("PREEMPTED", "ABORT") and task.request_id in self._names:
                self.offers[self._names.pop(task.request_id)] = []
        super().take(batch)

    def _prefill(self, task: Any) -> None:
        super()._prefill(task)
        self.rows[task.idx].own_from = OWN_NOTHING  # the other server reads it
        if name_of(task) not in self.offers:
            self._names[task.request_id] = name_of(task)
            self.offers[name_of(task)] = self.rows[task.idx].table


class Prefill(RealHost):
    def task(self, request: Request) -> Any:
        task = super().task(request)
        task.max_tokens, task.eos_token_ids = 1, [END]
        task.disaggregate_info = {"prefill_ip": "p", "prefill_connector_port": 1}
        return task

    def take_tokens(self, rng: random.Random) -> None:
        """FastDeploy's thread waits until decode has the blocks."""
        if not self.world.host.computed:
            super().take_tokens(rng)

    def _take_token(self, task: Any, token: int, root: Any) -> None:
        self.world.host.computed[name_of(task)] = task, token

    def check(self) -> None:
        super().check()
        for task in self.manager.running:
            if len(task.block_tables) * self.block_size < task.need_prefill_tokens:
                raise WrongError(f"{task.request_id} runs without all of its blocks")


class Decode(RealHost):
    def take(self, rng: random.Random) -> None:
        if not self.world.faults.strike("late batch", rng):
            super().take(rng)

    def _put(self, tasks: Any, lost: str) -> None:
        """FastDeploy answers clients of preempted requests when it has scheduled."""
        if lost != "lost before put":
            for task in tasks:
                if task.task_type.name == "PREEMPTED":
                    self.count["preempted"] += 1
                    self.world.host.end(task.request_id, "preempted")
        super()._put(tasks, lost)


class RealRoles(Between):
    def __init__(self, world: Any, prefill: Prefill, decode: Decode) -> None:
        super().__init__(prefill, decode, num_ranks=1)
        self.world, self.worker, self.abort = world, self, decode.abort
        self.block_size = decode.block_size
        self.count: Counter[str] = Counter()
        self.hosts = prefill, decode
        for host in self.hosts:
            host.count, host.news, host.rank = self.count, [], host.worker.ranks[0]
        self.pausing: RealHost | None = None
        self._line: deque[Request] = deque()
        self._asking: list[Any] = []
        self.computed: dict[str, tuple[Any, int]] = {}
        """Requests whose blocks decode may read, and their first tokens, by the name of the transfer."""
        self._messages: list[Any] = []
        self._outcome: dict[str, bool] = {}
        """Whether all blocks arrived, which prefill learns."""
        cache = decode.cache_manager
        cache.link, cache._take_news = self, self.take
        cache.grants._clock = cache.grants.ledger._clock = world.clock
        engine = SimpleNamespace(
            resource_manager=decode.manager, scheduler=self, token_processor=SimpleNamespace(tokens_counter={})
        )
        self._tokens = FirstTokens(engine, cache, RequestOutput, clock=world.clock)

    # ---- clients, and FastDeploy's scheduler at decode

    def add(self, request: Request) -> None:
        if self._live(request.request_id) is not request:
            request.request_id = f"r{request.uid}"
        request.max_tokens += 1  # with one only, decode has nothing to do
        self._line.append(request)

    def _live(self, request_id: str) -> Request | None:
        return next((each for each in self.world.clients.requests.values() if each.request_id == request_id), None)

    def has_request(self, request_id: str) -> bool:
        return self._live(request_id) is not None

    def end(self, request_id: str, how: str) -> None:
        request = self._live(request_id)
        if request is not None:
            self.world.clients.ended(request.uid, how)

    def put_results(self, outputs: Any) -> None:
        for output in outputs:
            if "in time" in (output.error_msg or ""):
                raise WrongError(output.error_msg)
            if output.finished:
                self.end(output.request_id, f"answered {output.error_code}")

    def tell(self, session: Any) -> None:
        for host in self.hosts:
            host.tell(session)

    # ---- prefill gives a request its blocks, and asks decode for room

    def bring(self, rng: random.Random) -> None:
        if self._line and self.pausing is not self.prefill:
            task = self.prefill.task(self._line[0])
            if self.prefill.manager.preallocate_resource_in_p(task):
                self._line.popleft()
                self._asking.append(task)

    def ask(self, rng: random.Random) -> None:
        task, gives_up = pick(self._asking, rng.random()), rng.random() < 0.02
        strike = self.world.faults.strike
        dies, times = strike("lease breaks", rng), 1 + strike("message comes twice", rng)
        if task is None:
            return
        if self.pausing is self.prefill:
            self._refuse(task, 502)
            return
        granted = [self._preallocate(task) for _ in range(times)][-1]
        if granted and not dies:
            self._asking = [each for each in self._asking if each is not task]
            self.prefill.manager.add_request_in_p([task])
        elif granted or gives_up:
            self._refuse(task, 500)
            self.end_fetch(name_of(task), "the prefill server died")

    def _preallocate(self, task: Any) -> bool:
        request = self.world.clients.requests.get(task.uid)
        copy = Task.from_dict(task.to_dict())
        copy.uid, copy.prompt, copy.max_tokens = task.uid, task.prompt, request.max_tokens if request else 2
        return self.decode.manager.preallocate_resource_in_d(copy)

    def _refuse(self, task: Any, code: int) -> None:
        self._asking = [each for each in self._asking if each is not task]
        self.prefill.manager.pre_recycle_resource(task.request_id)
        self._send(task, error_code=code, error_msg="no")

    def _send(self, task: Any, **fields: Any) -> None:
        output = RequestOutput(request_id=task.request_id, ic_req_data=task.ic_req_data, **fields)
        output.metrics = output.metrics or RequestMetrics()
        self._messages.append(output.to_dict())

    # ---- blocks go to decode

    def send(self, command: Any) -> Any:
        """The rank receives messages."""
        self.handle(command)
        return ()

    def take(self) -> Any:
        """Messages of the rank arrive."""
        news, self.decode.news = self.decode.news, []
        return [RankNews(rank, each) for rank, each in news]

    def end_fetch(self, name: str, error: str | None = None, rank: int | None = None) -> None:
        if name in self.fetches:
            self._outcome[name] = error is None
            self.count["found"] += self.fetches[name].first_block
        super().end_fetch(name, error, rank)

    def sources(self, fetch: Any) -> Any:
        name = fetch.request_id
        table = self.prefill.worker.offers.get(name)
        if table == []:
            self.end_fetch(name, "the prefill server gave the request up")
        elif self.may_write(fetch) and name in self.computed:
            return table[fetch.first_block :][: len(fetch.slots)]
        return None

    def may_write(self, fetch: Any) -> bool:
        return bool(fetch.after_step <= self.decode.worker.last_step)

    # ---- first tokens go to decode

    def end_transfer(self, rng: random.Random) -> None:
        """Prefill learns the outcome of a transfer. 2.5 sends the first token earlier for an id that it has seen."""
        name, early = pick(self.computed, rng.random()), self.world.faults.strike("answer breaks", rng)
        ends, outcome = rng.random() < 0.05, self._outcome.get(name)
        if name is None:
            return
        task, token = self.computed[name]
        if outcome is None:
            if early:
                self._first(task, token, rng)
            return
        del self.computed[name]
        if outcome:
            self._first(task, END if ends else token, rng)
        else:
            self._send(task, error_code=501, error_msg="no")
        self.prefill.manager.finish_requests([task.request_id])

    def _first(self, task: Any, token: int, rng: random.Random) -> None:
        for _ in range(1 + self.world.faults.strike("message comes twice", rng)):
            self._send(task, outputs=CompletionOutput(index=0, send_idx=0, token_ids=[token]), finished=True)

    def hear(self, rng: random.Random) -> None:
        """FastDeploy's thread at decode, which also runs without a message."""
        message = pick(self._messages, rng.random())
        queue = [] if message is None else [("decode", [RequestOutput.from_dict(message)])]
        self._messages = [each for each in self._messages if each is not message]
        if self._tokens.is_empty(lambda: not queue):
            return
        for _, outputs in self._tokens.take(lambda: queue):
            for output in outputs:
                task = self.decode.manager.requests[output.request_id]
                token = output.outputs.token_ids[0]
                self.decode.manager.add_prefilled_request(output)
                self.world.clients.token(task.uid, token, self.world.root(task), self.world.tags)

    # ---- administration

    def pause(self, rng: random.Random) -> None:
        host = rng.choice(self.hosts)
        if not self.pausing:
            self.pausing = host
            host.cache_manager.gate.close()

    def go_on_pausing(self, rng: random.Random) -> None:
        host = self.pausing
        if not host:
            return
        cache = host.cache_manager
        cache.end(host.manager)
        if host is self.decode:
            self.world.clients.aborted.update(host.manager.requests)
        if host.manager.requests or cache.num_shared or host.queue.exist_tasks() or not host.worker.is_idle:
            return
        cache.reset()
        if len(cache.gpu_free_block_list) != cache.num_gpu_blocks:
            raise WrongError("a reset leaves blocks in use")
        cache.gate.open()
        self.count[f"paused {host.manager.config.scheduler_config.splitwise_role}"] += 1
        self.pausing = None

    # ---- laws

    @property
    def events(self) -> list[Any]:
        steps = {"schedule": 16, "take": 12, "run": 14, "take_tokens": 16}
        both = [(weight, getattr(host, name)) for host in self.hosts for name, weight in steps.items()]
        both += [(16, host.worker.run_devices) for host in self.hosts]
        ours = (self.bring, self.ask, self.scribble, self.arrive, self.end_transfer, self.hear)
        return [*both, *((16, each) for each in ours), (40, self.turn), (5, self.go_on_pausing), (0.5, self.pause)]

    def turn(self, rng: random.Random) -> None:
        ours = (self.bring, self.ask, self.prefill.turn, self.arrive, self.end_transfer, self.hear, self.decode.turn)
        for part in ours:
            part(rng)

    def check(self) -> None:
        for host in self.hosts:
            host.check()

    @property
    def progress(self) -> Any:
        passes = (each.worker.num_passes for each in self.hosts)
        return len(self.world.clients.requests), *passes, len(self._messages)

    @property
    def is_idle(self) -> bool:
        on_its_way = self._line or self._asking or self.computed or self._messages or self.fetches or self.pausing
        return not on_its_way and all(each.is_idle and each.worker.is_idle for each in self.hosts)

    def check_idle(self) -> None:
        self.decode.cache_manager.check_idle()
        for host in self.hosts:
            host.check_idle()


def roles(world: Any, rng: random.Random) -> None:
    block_size = rng.choice([2, 4])
    world.clients = Clients(world, block_size=block_size, kinds=8)
    host = partial(make_server, world, rng, block_size)
    world.host = RealRoles(world, host("prefill", Prefill), host("decode", Decode))


def make_server(world: Any, rng: random.Random, block_size: int, role: str, kind: Any) -> Any:
    device = world.size(f"{role} device", rng.randrange(LEAST, 40), LEAST)
    host, reports = world.size(f"{role} host", rng.choice([0, 20, 60]), 0), Reports(world)
    manager = make_manager(
        device, host, rng.choice(list(WritePolicy)).value, threshold=rng.randrange(1, 4), block_size=block_size,
        seats=rng.randrange(2, 7), max_tokens=rng.choice([8, 24, 16 * block_size]), role=role,
    )  # fmt: skip
    manager.cache_manager.reports = reports
    world.others.append(reports)
    sizes = {"blocks": device, "host_blocks": host, "block_size": block_size}
    return kind(world, manager, make_worker(world, reports, kind=RoleWorker, **sizes))


real = partial(fastdeploy, make=make_host, least=LEAST)

SCENARIOS |= {
    "real": real,
    "real updates": partial(updating, make=real),
    "real file": partial(real, backend="file"),
    "real attention_store": partial(real, backend="attention_store"),
    "real roles": roles,
}
