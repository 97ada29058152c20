"""A `WorkerCache` on CPU tensors, which FastDeploy drops at the end of a test."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import MAIN, WorkerCache
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime


@pytest.fixture
def make_cache():
    made = []

    def make(parts=(MAIN,), host_blocks=4, **settings):
        defaults = {"make_runtime": CpuRuntime, "layer_timeout_s": 5.0}
        made.append(WorkerCache(num_host_blocks=host_blocks, block_size=2, parts=parts, **{**defaults, **settings}))
        return made[-1]

    yield make
    for cache in made:
        cache.unregister(MAIN)
