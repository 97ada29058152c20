"""Plans beside full replays at each size, the log that they are made from, and the process that makes them."""

import subprocess
import sys
import time
from dataclasses import replace
from hashlib import sha256
from itertools import count
from sys import getsizeof

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.contract.plan import FEWEST_REQUESTS, Plan, PlannedSize
from fastdeploy_kvcache_v1.contract.sessions import UNTOLD, session_hint
from fastdeploy_kvcache_v1.explain.sizes import told
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.traffic_log import (
    MOST_BLOCKS,
    MOST_REQUESTS,
    NAME_BYTES,
    USUAL_RATE,
    Traffic,
    rate_of,
)
from fastdeploy_kvcache_v1.sizing import planner as planning
from fastdeploy_kvcache_v1.sizing.planner import LASTS_S, Planner
from fastdeploy_kvcache_v1.sizing.plans import make_plan
from tests.lab.replay.conftest import REAL_TRACE, traffic

POINTS = 2


def played(options, requests):
    replay = Replay(options)
    replay.run(requests)
    return replay


def check_plan(requests, device, host, eviction_policy="adaptive"):
    config = KVCacheConfig(device, host, eviction_policy=eviction_policy, max_queued_events=0)
    options = ReplayOptions(config, max_input_tokens=min(device, host or device) * config.block_size // 4, outputs=True)
    plan = make_plan(played(options, requests).manager.traffic(), config)
    assert len(plan.sizes) >= 5
    for size in plan.sizes:
        larger = replace(config, **{f"num_{size.tier}_blocks": size.num_blocks})
        full = played(replace(options, config=larger), requests)
        hit_share = (full.num_device_hit_tokens + full.num_host_hit_tokens) / full.num_input_tokens
        assert 100 * size.hit_share == pytest.approx(100 * hit_share, abs=POINTS), size
        assert size.error < 0.1


@pytest.mark.parametrize(
    ("kind", "device", "host"),
    [("chat", 1500, 2000), ("chat", 4000, 0), ("batch", 2000, 4000)],
)
def test_plan_of_generated_traffic_is_near_a_replay_at_each_size(tmp_path, kind, device, host):
    check_plan(read_trace(traffic(tmp_path / "trace.jsonl", kind, 2500)), device, host)


def test_plan_for_lru_is_near_a_replay_at_each_size(tmp_path):
    check_plan(read_trace(traffic(tmp_path / "trace.jsonl", "chat", 2500)), 1500, 2000, "lru")


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="no trace beside the checkout")
def test_plan_of_the_real_trace_is_near_a_replay_at_each_size():
    check_plan(read_trace(REAL_TRACE, 3000), 8000, 8000)


# ---- the log


def serve(manager, name, hashes, *, session=UNTOLD):
    sequence = GivenHashes(hashes, len(hashes) + 1, session)
    manager.match_prefix(name, sequence)
    manager.allocate(name, len(hashes))
    manager.take_swap_step()
    manager.commit(name, len(hashes))
    manager.finish(name)


def new_blocks(number, count):
    return [BlockHash(sha256(b"%d %d" % (number, index)).digest()) for index in range(count)]


def test_log_has_what_a_simulation_asks_for():
    manager = CacheManager(KVCacheConfig(64, 0, block_size=1), count().__next__)
    head = new_blocks(0, 8)
    serve(manager, "first", head)
    serve(manager, "second", [*head, *new_blocks(1, 4)], session=session_hint("a", return_in_s=7.0))
    traffic = manager.traffic()
    first, second = traffic.rows
    assert (traffic.rate, traffic.is_whole) == (1, True)
    assert (first.started, first.computed, first.grown, first.ended) == (0, 1, 0, 1)
    assert (second.started, second.ended) == (1, 2)
    assert (second.num_tokens, second.num_hit, second.num_findable, second.num_prompt) == (13, 8, 12, 12)
    assert (second.reads, second.writes, second.is_resumed, second.return_in_s) == (True, True, False, 7.0)
    assert second.session == session_hint("a").name
    assert second.names[: len(first.names)] == first.names
    assert len(second.names) == 12 * NAME_BYTES
    assert second.started_s < second.ended_s


def test_sampled_block_is_sampled_in_every_prompt():
    manager = CacheManager(KVCacheConfig(100_000, 0, block_size=1))
    for number in range(64):
        head = new_blocks(number, 100)
        for length in (3, 50, 100):
            serve(manager, f"{number} {length}", head[:length])
    traffic = manager.traffic()
    assert traffic.rate == USUAL_RATE
    rows = iter(traffic.rows)
    for short, middle, whole in zip(rows, rows, rows, strict=True):
        assert whole.names.startswith(middle.names)
        assert middle.names.startswith(short.names)
        assert [each.num_prompt for each in (short, middle)] == [len(each.names) // 8 for each in (short, middle)]
        assert len(whole.names) // NAME_BYTES in (100 // USUAL_RATE, 100 // USUAL_RATE + 1)
    sampled = sum(row.num_prompt for row in traffic.rows[2::3])
    assert sampled * USUAL_RATE == pytest.approx(64 * 100, rel=0.05)


@pytest.mark.parametrize(("num_requests", "num_blocks"), [(MOST_REQUESTS + 9, 1), (MOST_BLOCKS // 400 + 9, 400)])
def test_log_is_bounded_and_forgets_the_oldest(num_requests, num_blocks):
    manager = CacheManager(KVCacheConfig(512, 0, block_size=1, eviction_policy="lru"))
    for number in range(num_requests):
        serve(manager, str(number), new_blocks(number, num_blocks))
    traffic = manager.traffic()
    assert not traffic.is_whole
    assert num_requests - 12 < len(traffic.rows) + 2 <= num_requests
    assert sum(map(getsizeof, (value for row in traffic.rows for value in row))) < 8 << 20
    assert traffic.rows[-1].num_prompt == num_blocks


def test_rate_keeps_the_small_cache_and_the_history_in_bounds():
    rates = {size: rate_of(size) for size in (1, 1024, 1025, 5000, 40_000, 600_000, 10**7)}
    assert rates == {1: 1, 1024: 1, 1025: 2, 5000: 8, 40_000: 16, 600_000: 32, 10**7: 512}


def test_reset_and_another_size_begin_the_log_anew():
    manager = CacheManager(KVCacheConfig(64, 0, block_size=1))
    serve(manager, "before", new_blocks(0, 8))
    running = GivenHashes(new_blocks(1, 4), 5)
    manager.match_prefix("running", running)
    manager.allocate("running", 4)
    manager.take_swap_step()
    manager.reset_cache()
    manager.finish("running")
    assert manager.traffic() == Traffic(1, True, [])
    serve(manager, "after", new_blocks(0, 8))
    manager.resize_device_pool(5000)
    assert manager.traffic() == Traffic(8, False, [])


# ---- plans of a server


def busy(device=64, num_requests=FEWEST_REQUESTS, num_prompts=48):
    """A manager with a history: prompts of two blocks in turn."""
    manager = CacheManager(KVCacheConfig(device, 0, block_size=1, eviction_policy="lru", block_bytes=1 << 20))
    for number in range(num_requests):
        serve(manager, str(number), new_blocks(number % num_prompts, 2))
    return manager


def asked(planner):
    assert not planner.plan().is_ready
    for _ in range(3000):
        plan = planner.plan()
        if plan.is_ready:
            return plan
        time.sleep(0.01)
    raise AssertionError("no plan in 30 s")


@pytest.mark.process
def test_a_process_makes_one_plan_for_all_who_ask_in_a_minute(monkeypatch):
    commands = []
    run = subprocess.run
    monkeypatch.setattr(planning.subprocess, "run", lambda *args, **more: commands.append(args) or run(*args, **more))
    planner = Planner(busy())
    plan = asked(planner)
    assert plan.failure == ""
    assert [(size.tier, size.num_blocks) for size in plan.sizes] == [("device", 128), ("host", 64), ("host", 128)]
    assert plan.hit_share == 0
    assert all(size.hit_share > 0.6 for size in plan.sizes), "larger caches evict nothing"
    assert planner.plan() is plan
    assert len(commands) == 1
    planner._made_at -= LASTS_S
    assert asked(planner) == plan


@pytest.mark.parametrize(
    ("device", "num_requests", "words"),
    [
        (64, FEWEST_REQUESTS - 1, "Not known yet (1,999 of 2,000 requests)."),
        (128, FEWEST_REQUESTS, "Almost no block was evicted: more memory would hit no more."),
    ],
)
def test_plan_without_sizes_says_why(device, num_requests, words):
    manager = busy(device, num_requests)
    plan = make_plan(manager.traffic(), manager.config)
    assert plan.sizes == []
    assert words in told(plan)


def test_plan_in_words():
    plan = Plan(
        device_blocks=1024,
        host_blocks=2048,
        block_bytes=1 << 20,
        num_requests=12_000,
        seconds=7200.0,
        hit_share=0.612,
        sizes=[PlannedSize("host", 4096, 0.643, 0.011, 102_400)],
    )
    assert told(plan).splitlines() == [
        "  Last 12,000 requests, 2.0 h: 61.2% of the prompt tokens were hits.",
        "",
        "  host tier, now 2 GiB:",
        "             4 GiB   64.3% hits, +3.1 points (+-1.1), 1.2e+03 GiB a day to the host",
    ]


@pytest.mark.process
@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/file"])
def test_a_process_that_fails_is_told_and_tried_again(monkeypatch, executable, caplog):
    planner = Planner(busy(num_requests=1))
    monkeypatch.setattr(sys, "executable", executable)
    plan = asked(planner)
    assert plan.failure.startswith("the computation failed: ")
    assert "cannot be computed" in caplog.text
    monkeypatch.undo()
    planner._made_at -= LASTS_S
    assert asked(planner).num_requests == 1
