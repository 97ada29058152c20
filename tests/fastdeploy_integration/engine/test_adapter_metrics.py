"""What the adapter tells FastDeploy's own metrics."""

from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.hit_rates import WINDOW, HitRates, match_metrics
from fastdeploy_kvcache_v1.metadata import CacheLevel, MatchedSpan, MatchResult

from .fake_scheduler import FakeGauge, FakeScheduler, FakeTask, make_adapter, serve

RATES = ["hit_req_rate", "hit_token_rate", "gpu_hit_token_rate", "cpu_hit_token_rate"]


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
    scheduler.cache.send_swaps([SimpleNamespace()])
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


def test_hit_rates_tell_the_tiers_apart_and_count_a_request_that_hit_only_once():
    gauges = SimpleNamespace(**{name: FakeGauge() for name in RATES})
    rates = HitRates()
    rates.publish(gauges)
    assert [getattr(gauges, name).value for name in RATES] == [0, 0, 0, 0]
    for device, host in ((4, 4), (0, 1), (0, 0), (1, 0)):
        rates.count(10, device=device, host=host)
    rates.publish(gauges)
    assert [getattr(gauges, name).value for name in RATES] == [3 / 4, 10 / 40, 5 / 40, 5 / 40]


def test_a_match_names_what_is_here_and_what_comes_in_the_order_of_the_prompt():
    spans = (MatchedSpan(2, CacheLevel.DEVICE), MatchedSpan(1, CacheLevel.HOST), MatchedSpan(1, CacheLevel.DEVICE))
    made = match_metrics(MatchResult("r", spans, 4), [10, 11, 12, 13])
    assert (made["match_gpu_block_ids"], made["gpu_recv_block_ids"]) == ([10, 11, 13], [12])
    assert (made["gpu_match_token_num"], made["cpu_match_token_num"]) == (12, 4)
    others = {name: value for name, value in made.items() if "gpu" not in name and name != "cpu_match_token_num"}
    assert list(others.values()) == [0, [], 0, 0], f"there is no other tier: {others}"
