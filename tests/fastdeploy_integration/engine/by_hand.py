"""One engine by FastDeploy's rules, with its workers, whose steps a test takes by hand."""

from types import SimpleNamespace

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.adapter import PrefixCacheAdapter
from fastdeploy_kvcache_v1.storage.settings import Prefetch
from tests.world.clients import Request
from tests.world.fastdeploy_host import FastDeployHost
from tests.world.quiet import UIDS, Quiet
from tests.world.resource_manager import Control, EngineCache, Kind, ResourceManager, Status, Task
from tests.world.scenarios import add_store, make_worker

__all__ = ["Control", "Kind", "Status"]


class FakeGauge:
    value = None

    def set(self, value):
        self.value = value


def make_gauges():
    """Those of FastDeploy that the adapter sets."""
    names = "max_gpu_block_num max_cpu_block_num available_gpu_block_num free_gpu_block_num available_gpu_resource"
    names += " hit_req_rate hit_token_rate gpu_hit_token_rate cpu_hit_token_rate"
    return SimpleNamespace(**{name: FakeGauge() for name in names.split()})


class FakeTask(Task):
    def __init__(self, request_id, prompt, max_tokens=4, items=None):
        super().__init__(Request(next(UIDS), request_id, list(prompt), max_tokens))
        self.multimodal_inputs = items


def make_adapter(num_device_blocks, num_host_blocks=0, block_size=4, *, kind=PrefixCacheAdapter, **settings):
    config = KVCacheConfig(num_device_blocks, num_host_blocks, block_size, **settings)
    return kind(config, gauges=make_gauges(), whole_items=True)


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


class Server(Quiet):
    def __init__(
        self, device=40, host=0, *, release=26, seats=6, budget=24, backend="", prefetch="wait_complete", **settings
    ):
        super().__init__(4)
        cache = EngineCache(KVCacheConfig(device, host, 4, **settings), reports=self.reports)
        sizes = {"blocks": device, "host_blocks": host, "block_size": 4}
        worker = make_worker(self, self.reports, backend=backend, **sizes)
        self.manager = ResourceManager(cache, release=release, seats=seats, budget=budget)
        self.host = FastDeployHost(self, self.manager, worker, is_26=release == 26)
        if backend:
            add_store(self, SimpleNamespace(choice=lambda _: Prefetch(prefetch)), backend, cache, worker.ranks)
            self.store = self.others[0]
            cache.storage.release(self.manager)  # blocks have a name now

    def serve(self, *prompts, max_tokens=1):
        """Each alone. Returns how many tokens of each were cached."""
        cached = []
        for tokens in prompts:
            task = self.add("r", tokens, max_tokens)
            self.step()
            cached.append(task.prefill_start_index)
            self.run_dry()
        return cached
