"""One engine by FastDeploy's rules, with its workers, whose steps a test takes by hand.

The engine is the one of tests/world, and so are the workers: they know what every block must hold, and clients which
tokens they must get.
"""

import itertools
from types import SimpleNamespace

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.adapter import PrefixCacheAdapter
from fastdeploy_kvcache_v1.scheduler.load_costs import FEWEST_TOKENS
from fastdeploy_kvcache_v1.storage.settings import Prefetch
from fastdeploy_kvcache_v1.timings import LoadTime, PrefillTime, Timings
from tests.world.clients import Clients, Request
from tests.world.clock import Clock
from tests.world.fastdeploy_host import Control, EngineCache, FastDeployHost, Kind, Status, Task
from tests.world.memory import Tags
from tests.world.ranks import Rank, Worker
from tests.world.reports import Reports
from tests.world.scenarios import add_store
from tests.world.store import RankMemory
from tests.world.streams import VirtualDevice

__all__ = ["Control", "Kind", "Status"]

UIDS = itertools.count()


class FakeGauge:
    value = None

    def set(self, value):
        self.value = value


class FakeTask(Task):
    def __init__(self, request_id, prompt, max_tokens=4, items=None):
        super().__init__(Request(next(UIDS), request_id, list(prompt), max_tokens))
        self.multimodal_inputs = items


def make_adapter(num_device_blocks, num_host_blocks=0, block_size=4, *, kind=PrefixCacheAdapter, **settings):
    names = "max_gpu_block_num max_cpu_block_num available_gpu_block_num free_gpu_block_num available_gpu_resource"
    names += " hit_req_rate hit_token_rate gpu_hit_token_rate cpu_hit_token_rate"
    config = KVCacheConfig(num_device_blocks, num_host_blocks, block_size, **settings)
    gauges = SimpleNamespace(**{name: FakeGauge() for name in names.split()})
    return kind(config, gauges=gauges, whole_items=True)


# ---- the calls with which FastDeploy begins and ends one request


def begin(cache, task, num_tokens=None):
    """Match it, give it blocks for all of its prompt, and schedule its first `num_tokens`. Returns what was cached."""
    size = cache.manager.config.block_size
    task.block_tables, num_cached, _ = cache.request_match_blocks(task, size)
    missing = -(-len(task.prompt_token_ids) // size) - len(task.block_tables)
    task.block_tables.extend(cache.allocate_gpu_blocks(missing, task.request_id))
    cache.update_cache_blocks(task, size, len(task.prompt_token_ids) if num_tokens is None else num_tokens)
    return num_cached


def end(cache, task, status=Status.FINISHED):
    task.status = status
    cache.release_block_ids(task)
    cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)


def served(cache, task, status=Status.FINISHED):
    """From match to end, in one batch. Returns what was cached."""
    num_cached = begin(cache, task)
    cache.send_swaps([task])
    cache.batch_sent()
    end(cache, task, status)
    return num_cached


def found(cache, tokens):
    """How many tokens of a prompt are cached."""
    probe = FakeTask("probe", tokens)
    _, num_cached, _ = cache.request_match_blocks(probe, cache.manager.config.block_size)
    cache.release_block_ids(probe)
    return num_cached


# ---- the whole engine


class Host(FastDeployHost):
    batch = ()
    """The last one."""

    def _put(self, tasks, lost):
        self.batch = tuple(tasks)
        super()._put(tasks, lost)


class Server:
    """Stands for the world of its engine, in which nothing fails but what a step says."""

    weights = 0

    def __init__(
        self, device=40, host=0, *, release=26, seats=6, budget=24, backend="", prefetch="wait_complete", **settings
    ):
        self.clock, self.tags, self.log = Clock(), Tags(), lambda *_: None
        self.faults, self.others = SimpleNamespace(strike=lambda name, _: name in self._fails), []
        self._fails, self.copies_fail = (), False
        reports = self.reports = Reports(self)
        self.cache = EngineCache(KVCacheConfig(device, host, 4, **settings), budget=budget, reports=reports)
        memory = RankMemory(on_device=backend == "attention_store") if backend else None
        self.device = VirtualDevice(self.clock, lambda stream: stream == "kv-output" and self.copies_fail)
        rank = Rank(
            0, self.device, blocks=device, host_blocks=host, block_size=4, tags=self.tags, tell=reports.tell,
            storage=memory, clock=self.clock,
        )  # fmt: skip
        self.clients = Clients(self, block_size=4)
        self.host = Host(self, self.cache, Worker([rank], self.root), release=release, seats=seats, budget=budget)
        if backend:
            add_store(self, SimpleNamespace(choice=lambda _: Prefetch(prefetch)), backend, self.cache, [memory])
            self.store = self.others[0]
            self.cache.storage.release(self.host)  # blocks have a name now
        self.randrange = lambda number: self.raises_at
        """Stands for the random numbers of the host."""
        self.raises_at = 0

    def root(self, task):
        return self.weights, task.cache_salt

    @property
    def counters(self):
        return self.cache.manager.stats().counters

    @property
    def is_idle(self):
        """After the last request: nothing is left of any."""
        self.run_dry()
        self.cache.manager.check_idle()
        return True

    def add(self, name, prompt, max_tokens=4, **fields):
        request = Request(next(UIDS), name, list(prompt), max_tokens)
        vars(request).update(fields)
        self.clients.requests[request.uid] = request
        task = Task(request)
        self.host.add_request(task)
        return task

    def abort(self, name):
        self.clients.aborted.add(name)
        self.host.abort(name)

    def schedule(self, *fails):
        """Returns the batch that goes to the queue, or was to go there."""
        self.host.batch, self._fails = (), fails
        self.host.schedule(self)
        self._fails = ()
        return self.host.batch

    def step(self, *fails):
        """What ranks say arrives; a batch is scheduled, computed, and its tokens are read. `fails`: names of faults."""
        self.reports.arrive(None)
        batch = self.schedule(*fails)
        self.compute()
        return batch

    def compute(self):
        self.clock.advance(0.1)
        self.host.take(None)
        self.host.run(None)
        self.device.run_until(lambda: self.device.is_idle)
        for _ in range(3):
            self.host.take_tokens(None)
        self.cache.check()

    def run_dry(self):
        for _ in range(500):
            if not self.clients.requests:
                return
            self.step()
        raise AssertionError(f"no progress: {sorted(self.host.requests)}")

    def serve(self, *prompts, max_tokens=1):
        """Each alone. Returns how many tokens of each were cached."""
        cached = []
        for tokens in prompts:
            task = self.add("r", tokens, max_tokens)
            self.step()
            cached.append(task.prefill_start_index)
            self.run_dry()
        return cached

    def measured(self, copy_s, compute_s=1.0):
        """Seconds for each token."""
        load, prefill = LoadTime(100, 400 * copy_s), PrefillTime(FEWEST_TOKENS, 0.0, FEWEST_TOKENS * compute_s)
        self.cache.measured({0: Timings((load,) * 50, (prefill,) * 50)})
