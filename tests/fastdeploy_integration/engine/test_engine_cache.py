"""The engine's cache manager: what it opens, hears and tells, and what it is without."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.copy_report import socket_path
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.copy_reporter import CopyReporter
from fastdeploy_kvcache_v1.metadata import EVICT, SWAP_IN, CacheLevel, TransferReport, TransferResult
from fastdeploy_kvcache_v1.timings import LoadTime, PrefillTime, Timings
from tests.fastdeploy_integration.test_copy_channel import wait_for

from .engine_cache import FakeSignal, fake_fastdeploy, launched

__all__ = ["fake_fastdeploy"]


def test_an_engine_with_a_host_tier_hears_its_workers(fake_fastdeploy):
    manager = launched()
    assert manager.reports is not None
    assert manager.publisher.reports.latest() == ()
    reporter = CopyReporter(socket_path(77), rank=1)
    for step, kind in ((0, EVICT), (1, SWAP_IN)):
        reporter.tell(TransferReport((TransferResult(step, *kind, 1, 0, 0.0, (3,), "injected"),)))
    wait_for(lambda: [report.number for report in manager.reports.latest()] == [1], "both reports")
    assert [(report.rank, report.copies.swap_out.failures) for report in manager.publisher.reports.latest()] == [(1, 1)]
    told = []
    manager.manager.transfer_failed = lambda result: told.append((result.step, result.target, result.target_slots))
    resources = FakeResourceManager(manager)
    for _ in range(2):
        engine_patches.schedule(lambda: ([], []), resources, (), {})
    assert told == [(0, CacheLevel.HOST, (3,))], "once; what did not reach the device is the worker's affair"
    reporter.close()


@pytest.mark.parametrize("took", [(5.0, 7.0), (7.0, 5.0)])
def test_what_the_slowest_rank_measured_decides_what_is_loaded(fake_fastdeploy, took):
    manager = launched()
    reporters = [CopyReporter(socket_path(77), rank) for rank in (0, 1)]
    prefill = PrefillTime(100, 0.0, 1.0)
    for seconds, reporter in zip(took, reporters, strict=True):
        reporter.tell(TransferReport((TransferResult(0, *SWAP_IN, 3, 0, seconds),), prefills=(prefill,)))
    wait_for(lambda: len(manager.reports.latest()) == 2, "both reports")
    told, measured = [], manager.measured
    manager.measured = lambda timings: (told.append(timings), measured(timings))
    resources = FakeResourceManager(manager)
    for _ in range(2):
        engine_patches.schedule(lambda: ([], []), resources, (), {})
    assert told == [{rank: Timings((LoadTime(3, seconds),), (prefill,)) for rank, seconds in enumerate(took)}]
    costs = manager._load_choice.costs
    assert costs.blocks_worth_loading(100, 0, 100 * 4 + 1, budget=512) == 1, "2.33 s per block, 4 s to compute all"
    assert costs.blocks_worth_loading(50, 0, 50 * 4 + 1, budget=512) == 0, "1.67 s is what the faster one takes"
    for reporter in reporters:
        reporter.close()


def test_a_pause_ends_the_requests_that_wait_outside_fastdeploy(fake_fastdeploy):
    """2.5 has answered them with an error by then."""
    manager, cleared = launched(), []
    manager.storage = SimpleNamespace(clear=lambda: cleared.append(True), cache_reset=lambda: None)
    manager.held_back._requests.append(object())
    manager.reset()
    assert (cleared, len(manager.held_back)) == ([True], 0)


@pytest.mark.parametrize("settings", [{"num_cpu_blocks": 0}, {"enable_prefix_caching": False}])
def test_where_nothing_is_copied_nobody_listens(fake_fastdeploy, settings):
    manager = launched(**settings)
    assert manager.reports is None
    assert not socket_path(77).parent.exists()


def test_an_engine_that_cannot_listen_serves_and_says_why(fake_fastdeploy, caplog):
    socket_path(77).parent.touch()
    with caplog.at_level("WARNING"):
        manager = launched()
    assert manager.reports is None
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "the results of the workers' copies are not shown"
    ]
    engine_patches.schedule(lambda: ([], []), FakeResourceManager(manager), (), {})


class FakeResourceManager:
    def __init__(self, cache):
        self.cache_manager, self.batch = cache, []
        self.lock, self.waiting, self.running = threading.Lock(), deque(), []


@pytest.mark.parametrize(
    ("dynamic", "caching", "v1"), [(False, True, False), (True, False, False), (True, True, True), (False, True, True)]
)
def test_where_no_legacy_update_can_happen_nobody_looks_for_one(fake_fastdeploy, dynamic, caching, v1):
    """No thread, and no shared memory."""
    fake_fastdeploy.FD_ENABLE_V1_UPDATE_WEIGHTS = v1
    manager = launched(dynamic=dynamic, enable_prefix_caching=caching)
    assert (manager.updates, FakeSignal.opened) == (None, [])
    instance = FakeResourceManager(manager)
    tasks, errors = engine_patches.schedule(lambda: (instance.batch, []), instance, (), {})
    assert (tasks, errors) == (instance.batch, [])


@pytest.mark.parametrize(("host_blocks", "ranks_here", "heartbeats"), [(4, 8, 2), (0, 1, 1)])
def test_where_one_can_happen_its_signals_are_looked_at(fake_fastdeploy, host_blocks, ranks_here, heartbeats):
    manager = launched(dynamic=True, num_cpu_blocks=host_blocks, ranks_here=ranks_here)
    expected = [("model_weights_status", 1), ("prefix_tree_status", 1), ("worker_healthy_live_signal", heartbeats)]
    expected += [("kv_cache_status", 1)] if host_blocks else []
    assert FakeSignal.opened == [(*each, 77) for each in expected]
    assert manager.updates.enter() == 0
