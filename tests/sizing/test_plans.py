"""Plans beside full replays at each size, and the process that makes them."""

import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.plan import FEWEST_REQUESTS, Plan, PlannedSize
from fastdeploy_kvcache_v1.explain.sizes import told
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.traffic.log import Traffic
from fastdeploy_kvcache_v1.sizing import planner as planning
from fastdeploy_kvcache_v1.sizing.planner import LASTS_S, TIMEOUT_S, Planner, Task
from fastdeploy_kvcache_v1.sizing.plans import make_plan
from fastdeploy_kvcache_v1.sizing.simulation import Simulation
from fastdeploy_kvcache_v1.switch import SWITCH
from tests.lab.replay.conftest import REAL_TRACE, traffic
from tests.scheduler.test_traffic_log import new_blocks, serve

POINTS = 2


def played(options, requests):
    replay = Replay(options)
    replay.run(requests)
    return replay


def check_plan(requests, device, host):
    config = KVCacheConfig(device, host, max_queued_events=0)
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
    [("chat", 1500, 2000), ("batch", 4000, 0)],
)
def test_plan_of_generated_traffic_is_near_a_replay_at_each_size(tmp_path, kind, device, host):
    check_plan(read_trace(traffic(tmp_path / "trace.jsonl", kind, 2500)), device, host)


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="no trace beside the checkout")
def test_plan_of_the_real_trace_is_near_a_replay_at_each_size():
    check_plan(read_trace(REAL_TRACE, 3000), 8000, 8000)


@pytest.mark.parametrize(("device", "host"), [(300, 400), (500, 0)])
def test_simulated_real_size_does_what_the_real_cache_did(tmp_path, device, host):
    requests = read_trace(traffic(tmp_path / "trace.jsonl", "chat", 200))
    config = KVCacheConfig(device, host, eviction_policy="lru", max_queued_events=0)
    options = ReplayOptions(config, window=1, admissions_per_step=1, outputs=True, max_input_tokens=device * 16)
    replay = played(options, requests)
    log = replay.manager.traffic()
    outcome = Simulation(log, config).play(device, host)
    assert log.rate == 1
    assert outcome.hits == [row.num_hit // config.block_size for row in log.rows]
    assert sum(outcome.hits) > 500
    counters = replay.manager.stats().counters
    assert outcome.written == pytest.approx(counters.swap_out_blocks, rel=0.01)
    num_evicted = counters.host_evicted_blocks + counters.device_lost_blocks
    assert outcome.num_evicted == pytest.approx(num_evicted, rel=0.01)
    warm = Simulation(log, config, 50).play(device, host)
    assert warm.hits == outcome.hits[50:]
    assert warm.written <= outcome.written


def test_size_below_the_real_one_computes_what_that_one_found():
    """Prompts that are hits as a whole: the real cache has computed nothing of them."""

    def served(device):
        manager, rng = CacheManager(KVCacheConfig(device, 0, block_size=1, eviction_policy="lru")), random.Random(1)
        for number in range(500):
            serve(manager, str(number), new_blocks(rng.randrange(20), 2))
        return manager.traffic(), manager.config

    (log, config), (of_small, _) = served(64), served(16)
    hits = Simulation(log, config).play(16, 0).hits
    assert hits == [row.num_hit for row in of_small.rows]
    assert 0 < sum(hits) < sum(row.num_hit for row in log.rows)


def test_history_that_forgot_requests_is_measured_from_its_middle():
    manager = busy(num_requests=2 * FEWEST_REQUESTS)
    whole = manager.traffic()
    cut = Traffic(whole.rate, False, whole.rows)
    plan, all_of_it = make_plan(cut, manager.config), make_plan(whole, manager.config)
    assert (plan.num_requests, all_of_it.num_requests) == (FEWEST_REQUESTS, 2 * FEWEST_REQUESTS)
    assert plan.seconds < all_of_it.seconds
    assert plan.sizes[0].hit_share == pytest.approx(2 / 3)  # two blocks of three tokens
    assert 2 / 3 > all_of_it.sizes[0].hit_share > 0.65
    assert all_of_it.sizes[0].error < 0.05
    assert plan.evicted_blocks == all_of_it.evicted_blocks > 0


# ---- plans of a server


def busy(device=64, num_requests=FEWEST_REQUESTS, num_prompts=48):
    """A manager with a history: prompts of two blocks in turn."""
    manager = CacheManager(KVCacheConfig(device, 0, block_size=1, eviction_policy="lru", block_bytes=1 << 20))
    for number in range(num_requests):
        serve(manager, str(number), new_blocks(number % num_prompts, 2))
    return manager


def asked(planner, *, begins=True):
    assert not begins or not planner.plan().is_ready
    for _ in range(30_000):
        plan = planner.plan()
        if plan.is_ready:
            return plan
        time.sleep(0.01)
    raise AssertionError("no plan in 300 s")


def test_one_process_is_asked_at_a_time_outside_fastdeploy(monkeypatch):
    """FAKE: the process is a thread."""
    may_end, asked_of = threading.Event(), []

    def run(command, *, input, capture_output, env, timeout, check):
        asked_of.append((command, env, timeout, capture_output, check))
        assert may_end.wait(10)
        task = msgspec.msgpack.decode(input, type=Task)
        plan = make_plan(task.traffic, KVCacheConfig(**task.config))
        return SimpleNamespace(returncode=0, stdout=msgspec.msgpack.encode(plan))

    monkeypatch.setattr(planning.subprocess, "run", run)
    monkeypatch.setenv(SWITCH, "1")
    planner = Planner(busy(num_requests=5))
    assert planner.plan() == planner.plan() == Plan(is_ready=False)
    may_end.set()
    plan = asked(planner, begins=False)
    assert (plan.num_requests, plan.failure, plan.block_bytes) == (5, "", 1 << 20)
    assert planner.plan() is plan
    [(command, environment, timeout, *others)] = asked_of
    assert command == [sys.executable, "-m", "fastdeploy_kvcache_v1.sizing"]
    assert SWITCH not in environment
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(Path(planning.__file__).parents[2]), *sys.path[1:]]
    assert (timeout, others) == (TIMEOUT_S, [True, False])
    planner._made_at -= LASTS_S
    assert asked(planner) == plan
    assert len(asked_of) == 2


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
