"""The storage tier under random lives of requests inside FastDeploy: late copies, lost reports, lost batches, a store
that fails. The fake worker notices a block that holds anything but what its prefix says.
"""

import random

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy

from .attention_scheduler import AttentionScheduler
from .fake_scheduler import FakeTask
from .storage_scheduler import StorageScheduler
from .test_adapter_random import profiled_adapter, prompt


@pytest.mark.parametrize("policy", [policy.value for policy in WritePolicy])
@pytest.mark.parametrize("prefetch", ["wait_complete", "timeout", "best_effort"])
@pytest.mark.parametrize("seed", range(2))
def test_no_wrong_block_whatever_is_late_lost_or_failed(policy, prefetch, seed):
    rng = random.Random(f"{policy} {prefetch} {seed}")
    cache = profiled_adapter(24, 40, seed=seed, write_policy=policy)
    counters = live(StorageScheduler(cache, rng, prefetch=prefetch))
    if policy != "write_through_selective":  # few blocks are hit twice here
        assert min(counters.load.blocks, counters.store.blocks) > 0


@pytest.mark.parametrize("host_blocks", [0, 40])
@pytest.mark.parametrize("prefetch", ["wait_complete", "timeout", "best_effort"])
@pytest.mark.parametrize("seed", range(4))
def test_no_device_block_is_given_to_the_store_too_early(host_blocks, prefetch, seed):
    rng = random.Random(f"{host_blocks} {prefetch} {seed}")
    cache = profiled_adapter(32, host_blocks, seed=seed, write_policy="write_through")
    scheduler = AttentionScheduler(cache, rng, prefetch=prefetch)
    scheduler.loses = lambda: rng.random() < 0.03
    counters = live(scheduler)
    assert min(counters.load.blocks, counters.store.blocks) > 0
    assert min(scheduler.num_passes_between, scheduler.num_lost, scheduler.num_aborted) > 0


def live(scheduler):
    """A random life; returns the counters of the tier."""
    cache, rng = scheduler.cache, scheduler.rng
    scheduler.worker.fails = lambda: rng.random() < 0.1
    scheduler.store.failure_rate = 0.1
    for number in range(500):
        action = rng.random()
        if action < 0.01:
            scheduler.reset()
        elif action < 0.02:
            scheduler.lose_batch()
        elif action < 0.025:
            scheduler.reset()
            scheduler.storage.weights_changed()
            scheduler.worker.weights = f"weights {number}"
        elif action < 0.6 and len(scheduler.manager.requests) < 12:
            scheduler.add(FakeTask(f"r{number}", prompt(rng, shared=12), rng.randrange(1, 20)))
        scheduler.step()
        cache.check()
    scheduler.run_dry()
    scheduler.settle()
    cache.check()
    cache.manager.check_idle()
    return scheduler.storage.tier.counters
