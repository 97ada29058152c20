"""The adapter beside threads that ask and reset, and without prefix caching."""

import random
import threading

import numpy as np

from fastdeploy_kvcache_v1.errors import PoolInUseError

from .fake_scheduler import FakeScheduler, FakeTask, Status, make_adapter


def prompt(rng, shared=3, blocks=8):
    """One of a few long common prefixes, cut somewhere, and an own tail."""
    common = [rng.randrange(shared) + 1] * (4 * blocks)
    return common[: rng.randrange(len(common))] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 12))]


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
