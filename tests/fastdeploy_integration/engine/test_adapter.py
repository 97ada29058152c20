"""The adapter driven as FastDeploy drives its cache manager, with a FAKE scheduler and a FAKE worker."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, InvariantError
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.metadata import EVICT, TransferResult
from fastdeploy_kvcache_v1.swap_message import decode

from .by_hand import begin, end
from .fake_scheduler import Control, FakeScheduler, FakeTask, Kind, Status, make_adapter, serve


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


@pytest.mark.parametrize(
    ("prompts", "cached"),
    [
        ([[1] * 10, [1] * 10, [*[1] * 10, 9, 9]], [0, 8, 8]),  # 13 tokens have KV: three blocks
        ([[1] * 16, [1] * 16], [0, 12]),  # of a full hit the last block is computed
    ],
)
def test_a_second_turn_is_cached_but_for_its_last_token(prompts, cached):
    assert serve(FakeScheduler(make_adapter(40)), *prompts) == cached


def test_host_tier_serves_what_the_device_lost():
    cache = make_adapter(8, 40, write_policy="write_back")
    scheduler = FakeScheduler(cache, output_caching=False)
    first, second = [1] * 17, [2] * 25
    assert serve(scheduler, first, second, first) == [0, 0, 16]
    assert scheduler.worker.num_swapped_in == 3  # the tail of its path went first
    assert cache.hit_rates.num_host_tokens == 12


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
    begin(cache, elder)
    assert begin(cache, newcomer) == 0
    assert "request x is served without the cache: a live request has the same id" in caplog.text
    cache.cache_output_blocks(newcomer, 4)
    assert (elder.num_cached_blocks, newcomer.num_cached_blocks) == (3, 0)
    assert not set(cache.allocate_gpu_blocks(1, "other")) & {*elder.block_tables, *newcomer.block_tables}
    assert not cache.can_allocate_gpu_blocks(1)
    for task in (newcomer, elder):
        cache.check()
        end(cache, task)
    assert cache.num_recycled_wrongly == 0
    assert cache.can_allocate_gpu_blocks(7)


def test_a_preempted_request_finds_its_own_work_again_which_is_no_hit():
    cache = make_adapter(20, 20, write_through_threshold=1)
    task = FakeTask("x", [1] * 9)
    for attempt in range(2):
        assert begin(cache, task) == (0, 8)[attempt]
        cache.send_swaps([task])
        cache.batch_sent()
        end(cache, task, Status.PREEMPTED)
    counters = cache.manager.stats().counters
    assert (counters.requests_admitted, counters.device_hit_tokens) == (1, 0)
    assert (counters.requests_resumed, counters.resumed_hit_tokens) == (1, 8)
    assert not cache.manager.take_swap_step().evict


def test_recycling_what_one_does_not_hold_is_counted_and_ignored():
    cache = make_adapter(8)
    ids = cache.allocate_gpu_blocks(3, "a")
    cache.recycle_gpu_blocks(ids, "b")
    cache.recycle_gpu_blocks(ids[0], "a")
    cache.recycle_gpu_blocks(ids, "a")
    cache.recycle_gpu_blocks([np.int32(5), -1, 99])
    assert cache.num_recycled_wrongly == 3 + 1 + 3
    cache.manager.check_idle()


def test_how_many_blocks_can_be_asked_for():
    cache = make_adapter(8)
    assert [cache.can_allocate_gpu_blocks(number) for number in (-2, 0, 8, 9)] == [True, True, True, False]
    assert cache.allocate_gpu_blocks(-2) == []
    assert [cache.get_required_block_num(number, 4) for number in (0, 5)] == [0, 2]
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
    begin(cache, task := FakeTask("x", [1] * 17), 12)
    for computed in (4, 0, 12):
        cache.update_cache_blocks(task, 4, computed)
        assert task.num_cached_blocks == 3
        cache.check()


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


def test_a_reset_leaves_nothing_of_a_request_that_was_matched_or_whose_hashes_were_kept():
    cache = make_adapter(8, 8)
    tasks = [FakeTask(name, [1] * 9) for name in "ab"]
    for task in tasks:
        cache.request_match_blocks(task, 4)
    cache.release_block_ids(tasks[0])
    cache.reset()
    cache.check()
    assert len(cache._kept) == 0


def test_fastdeploys_gauges_show_the_size_that_profiling_found():
    cache = make_adapter(8)
    cache.update_cache_config(SimpleNamespace(total_block_num=np.int32(5)))
    assert (cache.num_gpu_blocks, cache._gauges.max_gpu_block_num.value) == (5, 5)


@pytest.mark.parametrize("part", ["manager", "_kept", "_lent", "_batch"])
def test_a_check_looks_at_every_part(monkeypatch, part):
    def found(*_):
        raise InvariantError("injected")

    cache = make_adapter(8)
    monkeypatch.setattr(getattr(cache, part), "check", found)
    with pytest.raises(InvariantError, match="injected"):
        cache.check()


def test_a_host_copy_that_failed_is_of_no_request_that_was_matched_and_not_scheduled():
    cache, task = make_adapter(8, 40, write_policy="write_back"), FakeTask("x", [1] * 17)
    serve(FakeScheduler(cache, output_caching=False), [1] * 17, [2] * 25)
    assert cache.request_match_blocks(task, 4)[1] == 16
    cache.host_copies_failed([TransferResult(1, *EVICT, 8, 0, 0.0, tuple(range(8)), "injected")])
    assert task.num_cached_blocks == 0
    cache.check()
