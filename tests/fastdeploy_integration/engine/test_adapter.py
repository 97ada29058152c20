"""The adapter driven as FastDeploy drives its cache manager."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_OUT, CacheLevel, CopyResult, MatchedSpan, MatchResult
from fastdeploy_kvcache_v1.errors import CacheStateError, InvariantError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.fastdeploy_gauges import WINDOW, HitRates, match_metrics

from .by_hand import FakeTask, Server, Status, begin, end, make_adapter, make_gauges, served


@pytest.mark.parametrize(
    ("settings", "max_tokens", "prompts", "cached"),
    [
        ({}, 4, [[1] * 10, [1] * 10, [*[1] * 10, 9, 9]], [0, 8, 8]),  # 13 tokens have KV: three blocks
        ({}, 4, [[1] * 16, [1] * 16], [0, 12]),  # of a full hit the last block is computed
        ({}, 1, [[1] * 10, [1] * 10], [0, 8]),
        ({"enable_prefix_caching": False}, 4, [[1] * 10, [1] * 10], [0, 0]),
        ({"device": 8, "host": 40, "write_policy": "write_back"}, 1, [[1] * 17, [2] * 25, [1] * 17], [0, 0, 16]),
    ],
)
def test_what_is_cached_of_prompts_that_are_served_one_after_the_other(settings, max_tokens, prompts, cached):
    server = Server(**settings)
    assert server.serve(*prompts, max_tokens=max_tokens) == cached
    assert server.counters.swap_in_blocks == (3 if "host" in settings else 0), "the tail of its path went first"
    rates, from_host = server.cache.hit_rates, 4 * server.counters.swap_in_blocks
    assert (rates.num_host_tokens, rates.num_device_tokens) == (from_host, sum(cached) - from_host)


def test_a_failed_host_copy_is_forgotten_and_what_the_device_holds_is_not():
    server = Server(10, 40, write_policy="write_through")
    server.copies_fail = True
    server.serve([1] * 12 + [2], [9] * 4)  # the copies of the first ride on the batch of the second
    server.copies_fail = False
    assert server.serve([1] * 12 + [3], [1] * 12 + [5]) == [12, 12], "the device still has it"
    server.serve(*([each] * 16 for each in range(20, 26)))
    assert server.serve([1] * 12 + [4], [20] * 16) == [12, 12], "both come from the host, where they are whole"
    assert server.counters.failed_transfer_blocks == 3


def test_a_host_copy_that_failed_is_of_no_request_that_was_matched_and_not_scheduled():
    server, task = Server(8, 40, write_policy="write_back"), FakeTask("x", [1] * 17)
    server.serve([1] * 17, [2] * 25)
    assert server.cache.request_match_blocks(task, 4)[1] == 16
    server.cache.host_copies_failed([CopyResult(1, *SWAP_OUT, 8, 0, 0.0, tuple(range(8)), "injected")])
    assert task.num_cached_blocks == 0
    server.cache.check()


def test_a_match_for_whose_host_blocks_there_is_no_room_is_left_for_later():
    server, task = Server(8, 40, write_policy="write_through"), FakeTask("x", [1] * 17)
    server.serve([1] * 17, [2] * 25, [3] * 25)
    cache = server.cache
    ids = cache.allocate_gpu_blocks(6, "other")
    with pytest.raises(CacheStateError, match="x: no device room for 4 host blocks"):
        cache.request_match_blocks(task, 4)
    cache.check()
    cache.recycle_gpu_blocks(ids, "other")
    cache.manager.check_idle()
    assert cache.request_match_blocks(task, 4)[1] == 16


def test_matching_releasing_and_computing_again_changes_nothing():
    cache = make_adapter(8)
    task, old = FakeTask("x", [1] * 9), FakeTask("x", [1] * 9)
    cache.release_block_ids(task)
    cache.update_cache_blocks(task, 4, 8)
    cache.cache_output_blocks(task, 4)
    cache.manager.check_idle()
    for _ in range(3):
        cache.request_match_blocks(task, 4)
        cache.check()
    cache.release_block_ids(old)
    assert cache.manager.stats().num_requests == 1, "an old request of the same id touches nothing"
    for _ in range(2):
        cache.release_block_ids(task)
    cache.manager.check_idle()
    begin(cache, task := FakeTask("y", [1] * 17), 12)
    for computed in (4, 0, 12):
        cache.update_cache_blocks(task, 4, computed)
        assert task.num_cached_blocks == 3
        cache.check()


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
    with pytest.raises(CacheStateError, match="got 8 device blocks, needs 9"):
        cache.allocate_gpu_blocks(9, "x")


def test_storage_is_not_there():
    cache, task = make_adapter(8), FakeTask("a", [1])
    assert cache.write_cache_to_storage(task) is None
    assert cache.write_cache_to_storage_decode(task) is None
    assert cache.write_all_cache_to_storage(task) is False
    assert cache.read_cache_from_storage_for_pd(task) == []


def test_fastdeploys_gauges_show_the_size_that_profiling_found():
    cache = make_adapter(8)
    cache.update_cache_config(SimpleNamespace(total_block_num=np.int32(5)))
    assert (cache.num_gpu_blocks, cache._gauges.max_gpu_block_num.value) == (5, 5)
    assert cache._gauges.available_gpu_block_num.value == 5
    assert type(cache.num_gpu_blocks) is int


@pytest.mark.parametrize("part", ["manager", "_kept", "_lent", "_batch"])
def test_a_check_looks_at_every_part(monkeypatch, part):
    def found(*_):
        raise InvariantError("injected")

    cache = make_adapter(8)
    monkeypatch.setattr(getattr(cache, part), "check", found)
    with pytest.raises(InvariantError, match="injected"):
        cache.check()


def test_a_reset_leaves_nothing_of_requests_that_run_were_matched_or_whose_hashes_were_kept():
    cache = make_adapter(24, 40)
    tasks = [FakeTask(f"r{index}", [1] * 20) for index in range(3)]
    for task in tasks:
        begin(cache, task, 8)
    for name in "ab":
        cache.request_match_blocks(waiting := FakeTask(name, [1] * 9), 4)
    cache.release_block_ids(waiting)
    cache.reset()
    cache.check()
    cache.manager.check_idle()
    assert len(cache._kept) == 0
    for task in tasks:
        task.status = Status.FINISHED
        cache.cache_output_blocks(task, 4)
        end(cache, task)
    cache.check()
    assert len(cache.gpu_free_block_list) == 24


# ---- what it tells FastDeploy's own metrics


RATES = ["hit_req_rate", "hit_token_rate", "gpu_hit_token_rate", "cpu_hit_token_rate"]


def shown(gauges, *names):
    return [getattr(gauges, name).value for name in names]


def test_gauges_follow_with_each_batch_or_news_and_are_set_only_when_they_change():
    cache = make_adapter(40, 3)
    gauges, seen = cache._gauges, ("hit_req_rate", "free_gpu_block_num")
    for name in "ab":
        served(cache, FakeTask(name, [1] * 10))
    cache.allocate_gpu_blocks(8)
    cache.send_swaps([])
    assert shown(gauges, "max_gpu_block_num", "max_cpu_block_num") == [40, 3]
    assert shown(gauges, "free_gpu_block_num", "available_gpu_resource") == [30, 0.75], "two are cached"
    assert cache.available_gpu_resource == 0.75
    assert shown(gauges, *RATES) == [0.5, 0.4, 0.4, 0]
    for name in seen:
        getattr(gauges, name).value = "as it was"
    cache.send_swaps([FakeTask("x", [1])])
    assert shown(gauges, *seen) == ["as it was"] * 2
    ids = cache.allocate_gpu_blocks(3, "other")
    for change, free in ((lambda: None, 27), (lambda: cache.recycle_gpu_blocks(ids, "other"), 30)):
        change()
        cache.send_swaps([])
        assert shown(gauges, *seen) == ["as it was", free]
    cache.reset()
    assert shown(gauges, "free_gpu_block_num", "available_gpu_block_num") == [40, 40]
    cache.send_swaps([FakeTask("x", [1])])
    assert shown(gauges, *RATES) == [0, 0, 0, 0]


def test_hit_rates_tell_the_tiers_apart_count_a_request_that_hit_once_and_start_anew_after_a_window():
    gauges, rates = make_gauges(), HitRates()
    rates.publish(gauges)
    assert shown(gauges, *RATES) == [0, 0, 0, 0]
    rates.count(10, device=4, host=4)
    rates.publish(gauges)
    assert shown(gauges, *RATES) == [1, 8 / 10, 4 / 10, 4 / 10]
    for device, host in ((0, 1), (0, 0), (1, 0)):
        rates.count(10, device=device, host=host)
    rates.publish(gauges)
    assert shown(gauges, *RATES) == [3 / 4, 10 / 40, 5 / 40, 5 / 40]
    rates.count(10, device=0, host=0, stored=5)
    rates.publish(gauges)
    assert shown(gauges, *RATES) == [4 / 5, 15 / 50, 5 / 50, 5 / 50]
    for _ in range(WINDOW - 4):
        rates.count(10, device=4, host=0)
    assert (rates.num_requests, rates.num_tokens) == (1, 10)


@pytest.mark.parametrize("reads", [True, False])
def test_a_request_that_does_not_read_the_cache_is_no_miss(reads):
    cache, task = make_adapter(8), FakeTask("a", [1] * 9)
    task.skip_reading_prefix_cache = not reads
    begin(cache, task)
    assert cache.hit_rates.num_requests == reads


def test_loaded_tokens_of_a_match_are_told_apart_and_counted_once():
    spans = (MatchedSpan(2, CacheLevel.DEVICE), MatchedSpan(3, CacheLevel.HOST))
    loaded = {CacheLevel.DEVICE: (), CacheLevel.HOST: ("d", "a")}
    made = match_metrics(MatchResult("r", spans, 4), [10, 11, 12, 13, 14], "abcdef", loaded.get)
    assert (made["match_gpu_block_ids"], made["gpu_recv_block_ids"]) == ([10, 11], [12, 14])
    assert made["match_storage_block_ids"] == [13]
    assert [made[f"{tier}_match_token_num"] for tier in ("gpu", "cpu", "storage")] == [8, 8, 4]


def test_a_match_names_what_is_here_and_what_comes_in_the_order_of_the_prompt():
    spans = (MatchedSpan(2, CacheLevel.DEVICE), MatchedSpan(1, CacheLevel.HOST), MatchedSpan(1, CacheLevel.DEVICE))
    made = match_metrics(MatchResult("r", spans, 4), [10, 11, 12, 13])
    assert (made["match_gpu_block_ids"], made["gpu_recv_block_ids"]) == ([10, 11, 13], [12])
    assert (made["gpu_match_token_num"], made["cpu_match_token_num"]) == (12, 4)
    others = {name: value for name, value in made.items() if "gpu" not in name and name != "cpu_match_token_num"}
    assert list(others.values()) == [0, [], 0, 0], f"there is no other tier: {others}"
