"""What the adapter tells FastDeploy's own metrics."""

from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.hit_rates import WINDOW, HitRates

from .fake_scheduler import FakeScheduler, FakeTask, make_adapter, serve


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
