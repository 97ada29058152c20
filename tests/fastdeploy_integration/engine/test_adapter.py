"""The adapter driven as the host drives its cache manager, with a FAKE scheduler and a FAKE worker."""

import random
import threading

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, PoolInUseError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import adapter
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.hit_rates import WINDOW, HitRates
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.task_tokens import TaskTokens
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.swap_message import decode

from .fake_scheduler import Control, FakeScheduler, FakeTask, Kind, Status, make_adapter, serve


def prompt(rng, shared=3, blocks=8):
    """One of a few long common prefixes, cut somewhere, and an own tail."""
    common = [rng.randrange(shared) + 1] * (4 * blocks)
    return common[: rng.randrange(len(common))] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 12))]


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("host_blocks", [0, 12, 200])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(policy, host_blocks, seed):
    rng = random.Random(f"{policy} {host_blocks} {seed}")
    cache = make_adapter(24, host_blocks, write_policy=policy)
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
    if host_blocks == 200:
        assert scheduler.worker.num_swapped_in > 0
        assert scheduler.worker.num_swapped_out > 0


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("seed", range(3))
def test_host_copies_that_failed_are_never_read(policy, seed):
    """The fake worker notices a block whose host copy did not arrive."""
    rng = random.Random(f"{policy} {seed}")
    cache = make_adapter(24, 40, write_policy=policy)
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


def test_a_failed_host_copy_is_forgotten_and_what_the_device_holds_is_not():
    cache = make_adapter(10, 40, write_policy="write_through")
    scheduler = FakeScheduler(cache)
    scheduler.worker.fails = lambda: True
    serve(scheduler, [1] * 12 + [2], [9] * 4)  # the copies of the first ride on the batch of the second
    scheduler.worker.fails = lambda: False
    assert serve(scheduler, [1] * 12 + [3]) == [12], "the device still has it"
    assert cache.manager.stats().counters.failed_transfer_blocks > 0
    serve(scheduler, *([each] * 16 for each in range(20, 26)))
    assert serve(scheduler, [1] * 12 + [4], [20] * 16) == [12, 12], "both come from the host, where they are whole"


def test_output_is_the_same_with_and_without_cache():
    def outputs(**settings):
        rng = random.Random(5)
        scheduler = FakeScheduler(make_adapter(24, 40, **settings))
        for number in range(60):
            scheduler.add(FakeTask(f"r{number}", prompt(rng), 6))
        scheduler.run_dry()
        return {name: task.output_token_ids for name, task in scheduler.finished.items()}

    assert outputs() == outputs(enable_prefix_caching=False)


def test_second_turn_is_cached_but_for_its_last_token():
    scheduler = FakeScheduler(make_adapter(40))
    first = [1] * 10
    # 10 + 4 tokens, the last one without KV: 13 // 4 blocks; the second turn repeats them.
    assert serve(scheduler, first, first, [*first, 9, 9]) == [0, 8, 8]


def test_full_hit_leaves_the_last_block_to_be_computed():
    scheduler = FakeScheduler(make_adapter(40))
    tokens = [1] * 16
    assert serve(scheduler, tokens, tokens) == [0, 12]


def test_outputs_are_not_cached_when_the_host_says_so():
    scheduler = FakeScheduler(make_adapter(40), output_caching=False)
    task = FakeTask("a", [1] * 6, 9)
    scheduler.add(task)
    scheduler.run_dry()
    longer = [*task.prompt_token_ids, *task.output_token_ids, 1]
    assert serve(scheduler, longer) == [4]


def test_host_tier_serves_what_the_device_lost():
    cache = make_adapter(8, 40, write_policy="write_back")
    scheduler = FakeScheduler(cache, output_caching=False)
    first, second = [1] * 17, [2] * 25
    assert serve(scheduler, first, second, first) == [0, 0, 16]
    assert scheduler.worker.num_swapped_in == 3  # the tail of its path went first
    assert cache.hit_rates.num_host_tokens == 12


def test_match_metrics_tell_the_tiers_apart():
    cache = make_adapter(8, 40, write_policy="write_through")
    scheduler = FakeScheduler(cache, output_caching=False)
    serve(scheduler, [1] * 17, [2] * 17)
    evicted = FakeTask("x", [1] * 17)
    table, tokens, metrics = cache.request_match_blocks(evicted, 4)
    assert tokens == 16
    assert metrics["gpu_match_token_num"] + metrics["cpu_match_token_num"] == 16
    assert metrics["cpu_match_token_num"] > 0
    assert sorted(table) == sorted(metrics["match_gpu_block_ids"] + metrics["gpu_recv_block_ids"])
    cache.release_block_ids(evicted)
    cache.check()


def test_roll_back_cancels_the_swap_in():
    cache = make_adapter(8, 40, write_policy="write_back")
    scheduler = FakeScheduler(cache, output_caching=False)
    serve(scheduler, [1] * 17, [2] * 25)
    free, task = cache.manager.num_available_device_blocks, FakeTask("x", [1] * 17)
    cache.request_match_blocks(task, 4)
    cache.release_block_ids(task)
    batch = [Control(Kind.DECODE, FakeTask("y", [1]))]
    cache.send_swaps(batch)
    assert SWAP_ATTRIBUTE not in vars(batch[0]) or not decode(vars(batch[0])[SWAP_ATTRIBUTE])[0].swap_in
    assert cache.manager.num_available_device_blocks == free
    cache.check()


def test_matching_again_releases_first():
    cache = make_adapter(8)
    task = FakeTask("x", [1] * 9)
    for _ in range(3):
        cache.request_match_blocks(task, 4)
        cache.check()
    assert cache.manager.stats().num_requests == 1
    cache.release_block_ids(task)
    cache.release_block_ids(task)
    cache.manager.check_idle()


def test_unknown_and_repeated_releases_are_ignored():
    cache = make_adapter(8)
    task = FakeTask("x", [1] * 9)
    cache.release_block_ids(task)
    cache.update_cache_blocks(task, 4, 8)
    cache.cache_output_blocks(task, 4)
    cache.manager.check_idle()


def test_an_old_request_of_the_same_id_touches_nothing():
    cache = make_adapter(8)
    old, new = FakeTask("x", [1] * 9), FakeTask("x", [1] * 9)
    cache.request_match_blocks(new, 4)
    cache.release_block_ids(old)
    assert cache.manager.stats().num_requests == 1


def test_a_second_request_of_a_live_id_leaves_the_first_ones_blocks_alone(caplog):
    cache = make_adapter(8)
    elder, newcomer = FakeTask("x", [1] * 13), FakeTask("x", [2] * 9)
    elder.block_tables, _, _ = cache.request_match_blocks(elder, 4)
    elder.block_tables.extend(cache.allocate_gpu_blocks(4, "x"))
    cache.update_cache_blocks(elder, 4, 13)
    assert elder.num_cached_blocks == 3
    newcomer.block_tables, matched, _ = cache.request_match_blocks(newcomer, 4)
    assert (newcomer.block_tables, matched) == ([], 0)
    assert "request x is served without the cache: a live request has the same id" in caplog.text
    newcomer.block_tables = cache.allocate_gpu_blocks(3, "x")
    cache.update_cache_blocks(newcomer, 4, 9)
    cache.cache_output_blocks(newcomer, 4)
    assert newcomer.num_cached_blocks == 0
    assert not set(cache.allocate_gpu_blocks(1, "other")) & {*elder.block_tables, *newcomer.block_tables}
    assert not cache.can_allocate_gpu_blocks(1)
    for task in (newcomer, elder):
        cache.check()
        task.status = Status.FINISHED
        cache.release_block_ids(task)
        cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], "x")
    assert cache.num_recycled_wrongly == 0
    assert cache.can_allocate_gpu_blocks(7)


@pytest.mark.parametrize(
    ("items", "times"), [(None, 1), ({}, 1), ({"mm_positions": [], "mm_hashes": []}, 1), ("an image", 4)]
)
def test_a_request_that_waits_is_hashed_once_unless_it_has_images(monkeypatch, items, times):
    made = []

    class Counted(TaskTokens):
        def __init__(self, *args):
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(adapter, "TaskTokens", Counted)
    cache = make_adapter(8)
    task = FakeTask("x", [1] * 9, items=images((1, 2)) if items == "an image" else items)
    for _ in range(4):
        cache.request_match_blocks(task, 4)
        cache.release_block_ids(task)
    assert len(made) == times


def test_a_preempted_request_finds_its_own_work_again_which_is_no_hit():
    cache = make_adapter(20, 20, write_through_threshold=1)
    task = FakeTask("x", [1] * 9)
    for attempt in range(2):
        task.block_tables, cached, _ = cache.request_match_blocks(task, 4)
        assert cached == (0, 8)[attempt]
        task.block_tables += cache.allocate_gpu_blocks(3 - len(task.block_tables), "x")
        cache.update_cache_blocks(task, 4, 9)
        cache.send_swaps([task])
        cache.batch_sent()
        task.status = Status.PREEMPTED
        cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], "x")
        cache.release_block_ids(task)
    counters = cache.manager.stats().counters
    assert (counters.requests_admitted, counters.device_hit_tokens) == (1, 0)
    assert (counters.requests_resumed, counters.resumed_hit_tokens) == (1, 8)
    assert not cache.manager.take_swap_step().evict


def test_hashes_of_aborted_requests_are_not_kept(monkeypatch):
    cache = make_adapter(20)
    scheduler = FakeScheduler(cache)
    kept = cache._kept
    for request_id in "ab":
        scheduler.add(FakeTask(request_id, [1] * 9, 60))
    scheduler.step()
    scheduler.running[0].status = Status.PREEMPTED  # the host says the same of aborted requests
    scheduler.aborting.add("a")
    scheduler.step()
    assert len(kept) == 0
    scheduler.reset()
    scheduler.waiting.clear()
    cache.manager.check_idle()


def test_recycling_what_one_does_not_hold_is_counted_and_ignored():
    cache = make_adapter(8)
    ids = cache.allocate_gpu_blocks(3, "a")
    cache.recycle_gpu_blocks(ids, "b")
    cache.recycle_gpu_blocks(ids[0], "a")
    cache.recycle_gpu_blocks(ids, "a")
    cache.recycle_gpu_blocks([np.int32(5), -1, 99])
    assert cache.num_recycled_wrongly == 3 + 1 + 3
    cache.manager.check_idle()


def test_counts_below_zero():
    cache = make_adapter(8)
    assert cache.can_allocate_gpu_blocks(-2)
    assert cache.can_allocate_gpu_blocks(0)
    assert cache.allocate_gpu_blocks(-2) == []
    assert cache.get_required_block_num(0, 4) == 0
    assert cache.get_required_block_num(5, 4) == 2


def test_too_many_blocks():
    cache = make_adapter(8)
    assert not cache.can_allocate_gpu_blocks(9)
    with pytest.raises(CacheStateError, match="9 device blocks wanted, 8 available"):
        cache.allocate_gpu_blocks(9, "x")


def test_evictable_blocks_count_as_available_unless_told_otherwise():
    scheduler = FakeScheduler(make_adapter(8))
    serve(scheduler, [1] * 17)
    cache = scheduler.cache
    assert len(cache.gpu_free_block_list) < 8
    assert cache.can_allocate_gpu_blocks(8)
    assert not cache.can_allocate_gpu_blocks(8, try_free_gpu_blocks=False)
    assert len(cache.allocate_gpu_blocks(8)) == 8


def test_fewer_computed_tokens_change_nothing():
    cache = make_adapter(8)
    task = FakeTask("x", [1] * 17)
    task.block_tables, _, _ = cache.request_match_blocks(task, 4)
    task.block_tables.extend(cache.allocate_gpu_blocks(5, "x"))
    for computed in (12, 4, 0, 12):
        cache.update_cache_blocks(task, 4, computed)
        assert task.num_cached_blocks == 3
        cache.check()


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


def test_gauges_follow():
    cache = make_adapter(8, 3)
    gauges = cache._gauges
    cache.allocate_gpu_blocks(2)
    cache.send_swaps([])
    assert (gauges.max_gpu_block_num.value, gauges.max_cpu_block_num.value) == (8, 3)
    assert (gauges.free_gpu_block_num.value, gauges.available_gpu_resource.value) == (6, 0.75)
    assert cache.available_gpu_resource == 0.75
    cache.reset()
    assert (gauges.free_gpu_block_num.value, gauges.available_gpu_block_num.value) == (8, 8)


def test_hit_rates_are_published():
    scheduler = FakeScheduler(make_adapter(40), output_caching=False)
    serve(scheduler, [1] * 10, [1] * 10)
    gauges = scheduler.cache._gauges
    assert (gauges.hit_req_rate.value, gauges.hit_token_rate.value) == (0.5, 0.4)
    assert (gauges.gpu_hit_token_rate.value, gauges.cpu_hit_token_rate.value) == (0.4, 0)
    scheduler.cache.reset()
    assert scheduler.cache.hit_rates.num_requests == 0
    scheduler.cache.send_swaps([object()])
    assert (gauges.hit_req_rate.value, gauges.hit_token_rate.value) == (0, 0)


def test_gauges_are_set_only_when_they_change():
    scheduler = FakeScheduler(make_adapter(40), output_caching=False)
    serve(scheduler, [1] * 10)
    scheduler.cache.send_swaps([object()])  # shows what the end of the last request gave back
    gauges = scheduler.cache._gauges
    for name in ("hit_req_rate", "free_gpu_block_num"):
        getattr(gauges, name).value = "as it was"
    scheduler.cache.send_swaps([object()])
    assert (gauges.hit_req_rate.value, gauges.free_gpu_block_num.value) == ("as it was", "as it was")
    scheduler.cache.allocate_gpu_blocks(3, "other")
    scheduler.cache.send_swaps([])
    assert gauges.hit_req_rate.value == "as it was"
    assert gauges.free_gpu_block_num.value == len(scheduler.cache.gpu_free_block_list)


def test_hit_rates_start_anew_after_a_window():
    rates = HitRates()
    for _ in range(WINDOW + 1):
        rates.count(10, device=4, host=0)
    assert (rates.num_requests, rates.num_tokens) == (1, 10)


class Position:
    def __init__(self, offset, length):
        self.offset, self.length = offset, length


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


def images(*positions):
    return {"mm_positions": [Position(*position) for position in positions], "mm_hashes": ["h"] * len(positions)}


def test_a_match_never_ends_inside_an_image():
    scheduler = FakeScheduler(make_adapter(40), output_caching=False)
    for request_id, tail, expected in (("a", [], 0), ("b", [7], 4)):
        # The image covers [6, 30); the second prompt differs at 24, in the middle of it.
        tokens = [1] * 6 + [2] * 18 + tail + [2] * 12
        task = FakeTask(request_id, tokens, 2, images((6, 24)))
        scheduler.add(task)
        scheduler.step()
        assert task.num_cached_blocks * 4 >= expected
        scheduler.run_dry()
    assert task.prefill_end_index == len(tokens)
    assert scheduler.cache.hit_rates.num_device_tokens == 4


@pytest.mark.parametrize("items", [images((2, 6), (4, 3)), {"mm_positions": [Position(0, 2)], "mm_hashes": []}])
def test_what_cannot_be_hashed_is_served_without_caching(items, caplog):
    scheduler = FakeScheduler(make_adapter(40))
    for request_id in "ab":
        scheduler.add(FakeTask(request_id, [1] * 12, 3, items))
        scheduler.run_dry()
    assert scheduler.cache.hit_rates.num_device_tokens == 0
    assert "request a is served without the cache, its tokens cannot be hashed" in caplog.text
    scheduler.cache.manager.check_idle()


POISON = [
    {"mm_positions": [None], "mm_hashes": ["h"]},
    {"mm_positions": [Position("x", 2)], "mm_hashes": ["h"]},
    {"mm_positions": [Position(0, 2)], "mm_hashes": [Unprintable()]},
    {"mm_positions": 7, "mm_hashes": ["h"]},
    {"mm_positions": np.ones((2, 2)), "mm_hashes": ["h", "h"]},
    ["h"],
]


@pytest.mark.parametrize("items", POISON)
def test_a_request_that_cannot_be_hashed_lets_the_others_pass(items, caplog):
    """The host would schedule nothing behind a request whose match raises."""
    scheduler = FakeScheduler(make_adapter(40))
    for request_id, given in (("before", None), ("poisoned", items), ("behind", None)):
        scheduler.add(FakeTask(request_id, [1] * 12, 3, given))
    scheduler.run_dry()
    scheduler.cache.check()
    assert scheduler.finished.keys() == {"before", "poisoned", "behind"}
    assert scheduler.finished["poisoned"].num_cached_blocks == 0
    assert "matching it failed" not in caplog.text
    scheduler.cache.manager.check_idle()


def test_a_match_that_fails_in_the_cache_itself_leaves_no_trace(monkeypatch, caplog):
    cache = make_adapter(8)
    scheduler = FakeScheduler(cache)
    serve(scheduler, [1] * 9)

    def broken(*_):
        raise RuntimeError("a defect of ours")

    with monkeypatch.context() as patched:
        patched.setattr(cache.manager, "allocate", broken)
        task = FakeTask("x", [1] * 9)
        assert cache.request_match_blocks(task, 4)[:2] == ([], 0)
    assert "request x is served without the cache: matching it failed" in caplog.text
    assert "a defect of ours" in caplog.text
    cache.check()
    cache.manager.check_idle()
    assert cache.request_match_blocks(task, 4)[1] == 8


def test_storage_is_not_there():
    cache = make_adapter(8)
    task = FakeTask("a", [1])
    assert cache.write_cache_to_storage(task) is None
    assert cache.write_cache_to_storage_decode(task) is None
    assert cache.write_all_cache_to_storage(task) is False
    assert cache.read_cache_from_storage_for_pd(task) == []


def test_a_match_that_the_host_keeps_without_scheduling_it_pins_nothing():
    cache = make_adapter(10, 8)
    scheduler = FakeScheduler(cache)
    serve(scheduler, [1] * 26)
    waiting = FakeTask("w", [1] * 24 + [2] * 8)
    waiting.block_tables, matched, _ = cache.request_match_blocks(waiting, 4)
    assert matched == 24
    cache.send_swaps([])  # the host broke off: too few tokens left in this batch for the whole prompt
    cache.check()
    assert (waiting.block_tables, waiting.num_cached_blocks) == ([], 0)
    assert cache.can_allocate_gpu_blocks(8)  # what the host asks before it matches again
    scheduler.add(waiting)
    scheduler.run_dry()
    cache.manager.check_idle()
