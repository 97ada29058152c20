"""A manager is made before profiling finds how many device blocks there are: no part of it keeps the size of then."""

from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.scheduler import cache_manager
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

from .conftest import traffic

BEFORE_PROFILING = 144
"""What FastDeploy makes it with for batches of 8,192 tokens and eight requests at once."""


@pytest.fixture(scope="module", params=["chat", "agents"])
def trace(request, tmp_path_factory):
    return traffic(tmp_path_factory.mktemp("traces") / "trace", request.param, 1200)


def counters(trace, device, host, made_with):
    config = KVCacheConfig(device, host, max_queued_events=0)
    replay = Replay(ReplayOptions(config, window=8, admissions_per_step=1))
    if made_with is not None:
        replay.manager = CacheManager(replace(config, num_device_blocks=made_with), replay.clock)
        replay.manager.resize_device_pool(device)
    replay.run(read_trace(trace))
    return replay.manager.stats().counters


@pytest.mark.parametrize(("device", "host"), [(2000, 0), (2000, 3000), (1000, 4000)])
def test_a_resized_manager_does_what_one_made_with_that_size_does(monkeypatch, trace, device, host):
    monkeypatch.setattr(cache_manager, "LEAST_WATCHED", 64)  # else these traces would all be watched whole
    expected = counters(trace, device, host, None)
    assert expected.device_hit_tokens > 0 < expected.device_lost_blocks + expected.swap_out_blocks
    for made_with in (BEFORE_PROFILING, 100_000):
        assert counters(trace, device, host, made_with) == expected
