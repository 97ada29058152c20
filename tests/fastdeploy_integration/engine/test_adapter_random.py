"""The adapter over random lives of requests, and beside threads that ask and reset."""

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.errors import PoolInUseError

from .fake_scheduler import FakeScheduler, FakeTask, Status, make_adapter


def prompt(rng, shared=3, blocks=8):
    """One of a few long common prefixes, cut somewhere, and an own tail."""
    common = [rng.randrange(shared) + 1] * (4 * blocks)
    return common[: rng.randrange(len(common))] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 12))]


def profiled_adapter(num_device_blocks, num_host_blocks=0, *, seed, **settings):
    """Made with a guess, as FastDeploy does; profiling then finds more blocks, or fewer."""
    guess = random.Random(seed).randrange(1, 3 * num_device_blocks)
    cache = make_adapter(guess, num_host_blocks, **settings)
    FakeScheduler(cache).step()  # it schedules nothing yet
    cache.update_cache_config(SimpleNamespace(total_block_num=num_device_blocks))
    cache.check()
    return cache


@pytest.mark.parametrize("policy", [policy.value for policy in WritePolicy])
@pytest.mark.parametrize("host_blocks", [0, 12, 200])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(policy, host_blocks, seed):
    rng = random.Random(f"life {policy} {host_blocks} {seed}")
    shared = seed % 3 * 4
    cache = profiled_adapter(24, host_blocks, seed=seed, write_policy=policy, shared_prefill_tokens=shared)
    scheduler = FakeScheduler(cache, chance=lambda: rng.random() < 0.1)
    for number in range(400):
        action = rng.random()
        if action < 0.5 and len(scheduler.waiting) < 8:
            scheduler.add(FakeTask(f"r{number}", prompt(rng), rng.randrange(1, 20)))
        elif action < 0.55 and scheduler.running:
            scheduler.aborting.add(rng.choice(scheduler.running).request_id)
        elif action < 0.57:
            scheduler.reset()
        elif action < 0.6:
            cache.recycle_gpu_blocks([rng.randrange(-3, 30)], "nobody")
        scheduler.step()
        cache.check()
    scheduler.run_dry()
    cache.check()
    cache.manager.check_idle()
    assert scheduler.finished
    assert (cache.manager.stats().counters.shared_prefill_requests > 0) == (shared > 0)
    if host_blocks == 200:
        assert scheduler.worker.num_swapped_in > 0
        assert scheduler.worker.num_swapped_out > 0


@pytest.mark.parametrize("policy", [policy.value for policy in WritePolicy])
@pytest.mark.parametrize("seed", range(3))
def test_host_copies_that_failed_are_never_read(policy, seed):
    """The fake worker notices a block whose host copy did not arrive."""
    rng = random.Random(f"{policy} {seed}")
    cache = profiled_adapter(24, 40, seed=seed, write_policy=policy)
    scheduler = FakeScheduler(cache, chance=lambda: rng.random() < 0.1)
    num_failed = 0

    def fails():
        nonlocal num_failed
        failed = rng.random() < 0.4
        num_failed += failed
        return failed

    scheduler.worker.fails = fails
    for number in range(300):
        scheduler.add(FakeTask(f"r{number}", prompt(rng), rng.randrange(1, 12)))
        for _ in range(3):
            scheduler.step()
            cache.check()
    scheduler.run_dry()
    cache.check()
    cache.manager.check_idle()
    assert min(num_failed, scheduler.worker.num_swapped_in) > 3
    assert len(scheduler.finished) == 300


def test_resize_with_a_numpy_integer_while_the_scheduler_polls():
    cache = make_adapter(8)
    stop, errors = threading.Event(), []

    def poll():
        try:
            while not stop.is_set():
                if cache.can_allocate_gpu_blocks(2):
                    cache.recycle_gpu_blocks(cache.allocate_gpu_blocks(2, "p"), "p")
        except Exception as error:  # reported below
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    for size in (100, 50, 2000, 9):
        config = type("CacheConfig", (), {"total_block_num": np.int32(size)})
        while True:
            try:
                cache.update_cache_config(config)
                break
            except PoolInUseError:
                continue
    stop.set()
    thread.join()
    assert errors == []
    assert cache.num_gpu_blocks == 9
    assert type(cache.num_gpu_blocks) is int
    cache.manager.check_idle()


def test_reset_from_another_thread_while_requests_run():
    rng = random.Random(1)
    cache = make_adapter(24, 40)
    for number in range(50):
        tasks = [FakeTask(f"r{number}.{index}", prompt(rng)) for index in range(3)]
        for task in tasks:
            task.block_tables, _, _ = cache.request_match_blocks(task, 4)
            task.block_tables.extend(cache.allocate_gpu_blocks(2, task.request_id))
            cache.update_cache_blocks(task, 4, 8)
        thread = threading.Thread(target=cache.reset)
        thread.start()
        for task in tasks:
            task.status = Status.FINISHED
            cache.cache_output_blocks(task, 4)
            cache.release_block_ids(task)
            cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
        thread.join()
        cache.check()
        cache.reset()
        cache.manager.check_idle()
        assert len(cache.gpu_free_block_list) == 24


def test_output_is_the_same_with_and_without_cache():
    def outputs(**settings):
        rng = random.Random(5)
        scheduler = FakeScheduler(make_adapter(24, 40, **settings))
        for number in range(60):
            scheduler.add(FakeTask(f"r{number}", prompt(rng), 6))
        scheduler.run_dry()
        return {name: task.output_token_ids for name, task in scheduler.finished.items()}

    assert outputs() == outputs(enable_prefix_caching=False)
