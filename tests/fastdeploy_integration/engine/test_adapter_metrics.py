"""What the adapter tells FastDeploy's own metrics."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.hit_rates import WINDOW, HitRates, match_metrics
from fastdeploy_kvcache_v1.metadata import CacheLevel, MatchedSpan, MatchResult

from .by_hand import FakeTask, begin, make_adapter, make_gauges, served

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
    for _ in range(WINDOW - 3):
        rates.count(10, device=4, host=0)
    assert (rates.num_requests, rates.num_tokens) == (1, 10)


@pytest.mark.parametrize("reads", [True, False])
def test_a_request_that_does_not_read_the_cache_is_no_miss(reads):
    cache, task = make_adapter(8), FakeTask("a", [1] * 9)
    task.skip_reading_prefix_cache = not reads
    begin(cache, task)
    assert cache.hit_rates.num_requests == reads


def test_a_match_names_what_is_here_and_what_comes_in_the_order_of_the_prompt():
    spans = (MatchedSpan(2, CacheLevel.DEVICE), MatchedSpan(1, CacheLevel.HOST), MatchedSpan(1, CacheLevel.DEVICE))
    made = match_metrics(MatchResult("r", spans, 4), [10, 11, 12, 13])
    assert (made["match_gpu_block_ids"], made["gpu_recv_block_ids"]) == ([10, 11, 13], [12])
    assert (made["gpu_match_token_num"], made["cpu_match_token_num"]) == (12, 4)
    others = {name: value for name, value in made.items() if "gpu" not in name and name != "cpu_match_token_num"}
    assert list(others.values()) == [0, [], 0, 0], f"there is no other tier: {others}"
