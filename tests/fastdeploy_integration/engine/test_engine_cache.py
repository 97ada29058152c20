"""The engine's cache manager: what it opens, hears and tells, and what it is without."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest
import zmq

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.fastdeploy_integration.copy_report import socket_path
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.copy_reports import CopyNews
from fastdeploy_kvcache_v1.fastdeploy_integration.storage_channel import SESSION_VARIABLE
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.copy_reporter import CopyReporter
from fastdeploy_kvcache_v1.metadata import EVICT, SWAP_IN, CacheLevel, TransferReport, TransferResult
from fastdeploy_kvcache_v1.timings import LoadTime, PrefillTime, Timings
from fastdeploy_kvcache_v1.trace_recorder import VARIABLE as RECORD_VARIABLE
from tests.fastdeploy_integration.test_copy_channel import wait_for

from .engine_cache import FakeSignal, fake_fastdeploy, launched

__all__ = ["fake_fastdeploy"]


def test_an_engine_with_a_host_tier_hears_its_workers(fake_fastdeploy):
    manager = launched()
    assert fake_fastdeploy.exported == [(WritePolicy.WRITE_BACK, 2, None)], "workers take no flags"
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


# ---- with a store


class Storage:
    """Notes what it is told, instead of `EngineStorage`."""

    def __init__(self, tier, link, *, lock, find_namespace, passes, log):
        self.tier, self.link, self.passes, self.told = tier, link, passes, []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def tell(*given):
            self.told.append((name, *given))
            if name == "start_connected" and self.fails:
                raise StorageError("no licence")

        return tell

    fails = False


@pytest.fixture
def store(fake_fastdeploy, monkeypatch):
    """FAKE parts of a store, of which `make_link` may be another one."""
    fake_fastdeploy.environment_variables, fake_fastdeploy.FD_ATTENTION_BACKEND = {}, "APPEND_ATTN"
    tier = SimpleNamespace(weigh=lambda seconds_saved: None)
    parts = {
        "make_link": lambda chosen, commands, results: (commands, results),
        "make_tier": lambda manager, chosen, log, link, passes: tier,
        "settings_digest": lambda config, variables: "a digest",
        "EngineStorage": Storage,
        "check_settings": lambda chosen: None,
    }
    for name, part in parts.items():
        monkeypatch.setattr(engine_patches, name, part)
    monkeypatch.setattr(engine_patches.storage_channel, "export", lambda settings: exported.append(settings))
    monkeypatch.setenv(SESSION_VARIABLE, "01234567")
    exported = []
    return SimpleNamespace(tier=tier, exported=exported)


def stored(monkeypatch, backend="file", *, flush_only=False, **given):
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", str(int(flush_only)))
    flags = {"kvcache_storage_dir": "/unused", "kvcache_storage_gib": 1.0, "storage_prefetch": "timeout"}
    return launched(kvcache_storage_backend=backend, **flags, **given)


@pytest.mark.parametrize(
    ("backend", "given", "follows_passes", "told"),
    [
        ("file", {}, False, ["start"]),
        ("file", {"dynamic": True}, False, ["weights_changed", "start"]),
        ("attention_store", {}, True, ["start_connected"]),
        ("attention_store", {"num_cpu_blocks": 0}, True, ["start_connected"]),
        ("attention_store", {"flush_only": True}, False, ["start_connected"]),
    ],
)
def test_a_store_is_opened_with_the_cache_service(store, monkeypatch, backend, given, follows_passes, told):
    manager = stored(monkeypatch, backend, **given)
    assert [name for name, *_ in manager.storage.told] == told
    assert (manager.storage.passes is not None) == follows_passes
    commands, results = manager.storage.link
    assert len({*commands, results}) == 3, "one for each rank, and one for what they answer"
    assert (manager.publisher.storage, store.tier.observe_latency) == (store.tier, engine_patches.observe_storage)
    assert [each.backend for each in store.exported] == [backend]
    assert (manager.manager.config.max_queued_events > 0) == given.get("flush_only", False)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("reports", "the storage tier needs the results of the workers' copies"),
        ("link", "the storage tier cannot make its sockets"),
        ("start", "the storage backend attention_store cannot be used: no licence"),
    ],
)
def test_a_server_whose_store_cannot_be_opened_does_not_start(store, monkeypatch, broken, reason):
    def no_link(*_):
        raise zmq.ZMQError(zmq.EADDRINUSE)

    if broken == "reports":
        socket_path(77).parent.touch()
    elif broken == "link":
        monkeypatch.setattr(engine_patches, "make_link", no_link)
    else:
        monkeypatch.setattr(Storage, "fails", True)
    with pytest.raises(ConfigError, match=reason):
        stored(monkeypatch, "attention_store")


def test_a_store_that_does_not_work_now_is_left_for_later_and_one_that_cannot_is_refused(store, monkeypatch, caplog):
    def check(chosen):
        raise errors.pop()

    errors = [ConfigError("no such place"), StorageError("no answer")]
    monkeypatch.setattr(engine_patches, "check_settings", check)
    assert stored(monkeypatch).storage is not None
    assert caplog.messages == ["the storage does not work now, the server starts without its blocks: no answer"]
    with pytest.raises(ConfigError, match="no such place"):
        stored(monkeypatch)


def test_what_comes_back_from_the_workers_reaches_the_store_and_failed_host_copies_the_cache_first(store, monkeypatch):
    manager = stored(monkeypatch)
    copies = [TransferResult(0, *kind, 1, 0, 0.0, (3,), "injected") for kind in (EVICT, SWAP_IN)]
    news = CopyNews(tuple(copies), {0: 0}, timings={0: Timings()})
    told = manager.storage.told
    manager.host_copies_failed = lambda failed: told.append(("failed", failed))
    manager.measured = lambda timings: told.append(("measured", timings))
    manager.reports.close()
    manager.reports = SimpleNamespace(take=lambda: news)
    told.clear()
    manager.take_reports()
    assert told == [("failed", copies[:1]), ("measured", {0: Timings()}), ("copies_reported", news)]


def test_a_reset_empties_cache_and_store_and_shows_it(store, monkeypatch):
    manager, shown = stored(monkeypatch), []
    manager.publisher.publish_now = lambda: shown.append(len(manager.gpu_free_block_list))
    manager.allocate_gpu_blocks(3, "r")
    manager.storage.told.clear()
    manager.reset()
    assert shown == [8]
    assert manager.storage.told == [("clear",), ("cache_reset",)]


def test_a_request_that_fastdeploy_does_not_take_back_is_not_released_again(store, monkeypatch):
    taken, queued = [], []
    storage = SimpleNamespace(release=lambda resources: ["a"], queued=queued.append)

    def add_request(request):
        taken.append(request)
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        stored(monkeypatch).release_stored(storage, SimpleNamespace(add_request=add_request))
    assert (taken, queued) == (["a"], ["a"])


# ---- what a step does, and what is written down


def test_before_it_schedules_the_engine_hears_releases_and_looks_ahead(store, monkeypatch):
    manager = stored(monkeypatch, num_cpu_blocks=4)
    steps, resources = [], FakeResourceManager(manager)
    resources.waiting.extend(f"r{number}" for number in range(9))
    for name in ("take_reports", "release_stored", "expect", "send_swaps"):
        monkeypatch.setattr(manager, name, lambda *given, name=name: steps.append((name, *given)))
    manager.publisher.publish = lambda: steps.append(("publish",))
    manager.followers.put_back = lambda instance: steps.append(("put_back", instance))
    engine_patches.schedule(lambda: steps.append(("schedule",)) or ([], []), resources, (), {})
    names = "take_reports release_stored expect schedule put_back send_swaps publish"
    assert [name for name, *_ in steps] == names.split()
    assert steps[1][1:] == (manager.storage, resources)
    assert steps[2][1] == [f"r{number}" for number in range(9)][: manager.manager.config.lookahead_requests]
    assert steps[5][1:] == ([], []), "no row runs"


def test_rows_are_told_only_where_copies_wait_for_them(fake_fastdeploy, monkeypatch):
    manager, told = launched(num_cpu_blocks=0), []
    monkeypatch.setattr(manager, "send_swaps", lambda *given: told.append(given))
    engine_patches.schedule(lambda: ([], []), FakeResourceManager(manager), (), {})
    assert told == [([], None)]


@pytest.mark.parametrize("caching", [True, False])
def test_the_log_says_what_swap_space_bought(fake_fastdeploy, monkeypatch, caplog, caching):
    monkeypatch.setattr(engine_patches.swap_space, "require_host_memory", lambda config: None)
    with caplog.at_level("INFO"):
        launched(host_block_bytes=4096, swap_space=1.0, enable_prefix_caching=caching)
    first, *others = caplog.messages
    assert first.startswith("--swap-space 1 GiB: 4 host blocks of 4096 bytes on each of 2 tensor-parallel ranks")
    assert others == ([] if caching else ["--swap-space has no effect: prefix caching is off"])


def test_a_trace_is_recorded_where_the_environment_says(fake_fastdeploy, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "trace.jsonl"))
    with caplog.at_level("INFO"):
        manager = launched()
    assert manager.traced is not None
    assert f"a trace of the requests is recorded in {manager.publisher.recorder.path}" in caplog.messages
    manager.publisher.recorder.close()


def test_after_a_weight_update_every_request_starts_again_once_and_there_is_no_batch_before(store, monkeypatch):
    manager, done, epochs = stored(monkeypatch), [], iter([None, 1, 1])
    manager.updates = SimpleNamespace(enter=lambda: next(epochs))
    manager.transit.forget = lambda: done.append("forget")
    manager.batch_dropped = lambda: done.append("batch_dropped")
    manager.release_stored = manager.publisher.publish = lambda *_: None
    monkeypatch.setattr(engine_patches, "start_again", lambda resources: done.append("start_again"))
    resources = FakeResourceManager(manager)
    manager.storage.told.clear()
    for expected in ([], ["schedule"], ["schedule"]):
        done.clear()
        assert engine_patches.schedule(lambda: done.append("schedule") or ([], []), resources, (), {}) == ([], [])
        assert [each for each in done if each == "schedule"] == expected
        if manager.storage.told:
            assert done == ["start_again", "forget", "batch_dropped", "schedule"]
            assert ("weights_changed",) in manager.storage.told
            manager.storage.told = []


def test_when_fastdeploy_clears_its_data_the_store_forgets_its_requests_and_knows_that_rows_go_on(store, monkeypatch):
    manager = stored(monkeypatch)
    manager.storage.told.clear()
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=manager))
    assert engine_patches.clear_data(lambda: "cleared", engine, (), {}) == "cleared"
    assert manager.storage.told == [("clear",), ("rows_dropped",), ("cache_reset",)]


def test_a_request_that_the_store_holds_has_its_id(store, monkeypatch):
    manager = stored(monkeypatch)
    resources = SimpleNamespace(requests={}, lock=threading.Lock(), to_be_aborted_req_id_set=set())
    manager.storage.holds = lambda request_id: request_id == "held"
    waits = [manager.held_back.hold(resources, SimpleNamespace(request_id=name)) for name in ("held", "other")]
    assert waits == [True, False]


def test_what_the_queue_says_of_a_batch_is_passed_on(fake_fastdeploy):
    batch, _ = engine_patches.schedule(lambda: (["task"], []), FakeResourceManager(CarriesNothing(launched())), (), {})
    assert engine_patches.put_tasks(lambda tasks: "put", None, ((batch, 1),), {}) == "put"


class CarriesNothing:
    """A cache manager whose tasks are no tasks."""

    def __init__(self, manager):
        self._manager = manager
        self.send_swaps = lambda *_: None
        self.transit = SimpleNamespace(recover=lambda _: None, depart=lambda _, tasks: tasks, sent=lambda: None)

    def __getattr__(self, name):
        return getattr(self._manager, name)
