"""The engine's cache manager: what it opens, hears and tells, and what it is without."""

from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1 import __version__
from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, SWAP_OUT, CopyResult, PrefillTime, RankCopies, WorkerReport
from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.link import rank_link
from fastdeploy_kvcache_v1.link.messages import Gone, Memory
from fastdeploy_kvcache_v1.link.place import socket_path
from fastdeploy_kvcache_v1.storage import backends
from fastdeploy_kvcache_v1.storage.attention_store.tasks import FlushDone
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.parts import Parts
from fastdeploy_kvcache_v1.switch import SESSION_VARIABLE
from fastdeploy_kvcache_v1.telemetry.metrics import source_of
from fastdeploy_kvcache_v1.telemetry.trace_recorder import VARIABLE as RECORD_VARIABLE
from tests.fastdeploy_integration.fd_configs import fd_config
from tests.link.test_link import wait_for

from .by_hand import FakeTask, Server
from .engine_cache import FakeSignal, fake_fastdeploy, launch, launched

__all__ = ["fake_fastdeploy"]

FLAGS_AT_REST = {"kvcache_storage_dir": None, "kvcache_storage_gib": 10.0}


def rank_of(rank, num_ranks=2):
    ranks = {"local_engine_worker_queue_port": 77, "tensor_parallel_rank": rank, "tensor_parallel_size": num_ranks}
    link = rank_link(SimpleNamespace(parallel_config=SimpleNamespace(**ranks)))
    link.listen({})
    return link


def schedule(manager, wrapped=lambda: ([], []), waiting=()):
    resources = Server().manager
    resources.cache_manager = manager
    resources.waiting.extend(waiting)
    return engine_patches.schedule(wrapped, resources, (), {})


# ---- workers


def test_an_engine_with_a_host_tier_hears_its_workers(fake_fastdeploy):
    manager = launched()
    assert fake_fastdeploy.exported == [(None, None)], "workers take no flags"
    assert manager.publisher.reports.copies == {}
    link, prefill, copies = rank_of(1), PrefillTime(100, 0.0, 1.0), RankCopies()
    failed = (CopyResult(0, *kind, 1, 0, 0.0, (3,), "injected") for kind in (SWAP_OUT, SWAP_IN))
    link.send(WorkerReport((*failed, CopyResult(1, *SWAP_IN, 3, 0, 7.0)), prefills=(prefill,), copies=copies))
    wait_for(lambda: manager.publisher.reports.copies, "the report")
    told, measured = [], manager.measured
    manager.manager.transfer_failed = lambda result: told.append((result.step, *result.target_slots)) or ()
    manager.measured = lambda prefills: (told.append(prefills), measured(prefills))
    for _ in range(2):
        schedule(manager)
    assert told == [(0, 3), {1: (prefill,)}], "once; other copies are the worker's affair"
    assert manager._prefill_costs.seconds(0, 400) == 4.0
    link.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_copy_that_failed_on_several_ranks_is_told_once(fake_fastdeploy, num_ranks):
    """Each rank tells of it in its own time; of two copies that failed each is told."""
    manager, told = launched(num_ranks), []
    manager.manager.transfer_failed = lambda result: told.append((result.step, result.target_slots)) or ()
    first, second, copy_in = (
        CopyResult(step, *kind, 2, 0, 0.0, slots, "injected")
        for step, kind, slots in ((3, SWAP_OUT, (1, 2)), (5, SWAP_OUT, (1, 2)), (3, SWAP_IN, (7, 8)))
    )
    with ExitStack() as stack:
        ranks = [stack.enter_context(closing(rank_of(rank, num_ranks))) for rank in range(num_ranks)]
        for failed in ([copy_in, first], [second]):
            for link in ranks:
                link.send(WorkerReport(tuple(failed)))
                wait_for(lambda: manager.reports._new, "the report")
                schedule(manager)
    assert told == [(3, (1, 2)), (5, (1, 2))]


@pytest.mark.parametrize("settings", [{"num_cpu_blocks": 0}, {"enable_prefix_caching": False}])
def test_where_nothing_is_copied_nobody_listens_and_rows_are_told_to_none(fake_fastdeploy, monkeypatch, settings):
    manager, told = launched(**settings), []
    assert manager.reports is None
    assert not socket_path(77).parent.exists()
    monkeypatch.setattr(manager, "send_swaps", lambda *given: told.append(given))
    schedule(manager)
    assert told == [([], None if "num_cpu_blocks" in settings else [])]


def test_an_engine_that_cannot_listen_serves_and_says_why(fake_fastdeploy, caplog):
    socket_path(77).parent.touch()
    with caplog.at_level("WARNING"):
        manager = launched(**FLAGS_AT_REST)
    assert manager.reports is None
    (message,) = caplog.messages
    assert message.startswith("metrics of copies stay 0: ")
    schedule(manager)


DYNAMIC = {"dynamic_load_weight": True}


@pytest.mark.parametrize(
    # heartbeats: None where no legacy update can happen. Then there is no thread, and no shared memory.
    ("given", "v1", "heartbeats"),
    [
        ({}, False, None),
        ({}, True, None),
        (DYNAMIC, True, None),
        (DYNAMIC | {"enable_prefix_caching": False}, False, None),
        (DYNAMIC, False, 2),
        (DYNAMIC | {"num_cpu_blocks": 0, "worker_num_per_node": 1}, False, 1),
    ],
)
def test_the_signals_of_legacy_updates_are_looked_at_where_there_can_be_one(fake_fastdeploy, given, v1, heartbeats):
    fake_fastdeploy.FD_ENABLE_V1_UPDATE_WEIGHTS = v1
    manager = launched(**given)
    expected = [("model_weights_status", 1), ("prefix_tree_status", 1), ("worker_healthy_live_signal", heartbeats)]
    expected += [("kv_cache_status", 1)] if manager.reports else []
    assert FakeSignal.opened == ([(*each, 77) for each in expected] if heartbeats else [])
    assert (manager.updates is None) == (heartbeats is None)
    assert schedule(manager) == ([], [])


# ---- with a store


class Storage:
    """Notes what it is told, instead of `EngineStorage`."""

    fails = False

    def __init__(self, tier, link, *, passes, **_):
        self.tier, self.link, self.passes, self.told = tier, link, passes, []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def tell(*given):
            self.told.append((name, *given))
            if name == "start_connected" and self.fails:
                raise StorageError("no licence")

        return tell


@pytest.fixture
def store(fake_fastdeploy, monkeypatch):
    """FAKE parts of a store. Returns the tier, and the settings that workers are told."""
    fake_fastdeploy.environment_variables, fake_fastdeploy.FD_ATTENTION_BACKEND = {}, "APPEND_ATTN"
    tier = SimpleNamespace(weigh=lambda compute_s: None, metrics=source_of(StorageTier))
    made = SimpleNamespace(tier=tier, exported=fake_fastdeploy.exported)
    parts = {
        "make_tier": lambda *_, **__: made.tier,
        "settings_digest": lambda *_: "a digest",
        "EngineStorage": Storage,
        "check_settings": lambda chosen: None,
    }
    for name, part in parts.items():
        monkeypatch.setattr(engine_patches, name, part)
    made.lost = []
    process = lambda chosen, parts: SimpleNamespace(parts=parts, drop_memory=made.lost.append)  # noqa: E731
    monkeypatch.setattr(backends, "StoreProcess", process)
    monkeypatch.setenv(SESSION_VARIABLE, "01234567")
    return made


def stored(monkeypatch, backend="file", *, flush_only=False, **given):
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", str(int(flush_only)))
    return launched(kvcache_storage_backend=backend, num_key_value_heads=2, **given)


@pytest.mark.parametrize(
    ("backend", "given", "follows_passes", "told"),
    [
        ("file", {}, False, ["start"]),
        ("file", DYNAMIC, False, ["weights_changed", "start"]),
        ("attention_store", {}, True, ["start_connected"]),
        ("attention_store", {"num_cpu_blocks": 0}, True, ["start_connected"]),
        ("attention_store", {"flush_only": True}, False, ["start_connected"]),
    ],
)
def test_a_store_is_opened_with_the_cache_service(store, monkeypatch, backend, given, follows_passes, told):
    manager = stored(monkeypatch, backend, **given)
    assert [name for name, *_ in manager.storage.told] == told
    assert (manager.storage.passes is not None) == follows_passes
    if backend == "file":
        assert manager.storage.link.parts == Parts(2, 2)
        assert {Memory, Gone} <= manager.handlers.keys()
    else:
        assert manager.storage.link.num_ranks == manager.link.num_ranks
        assert FlushDone in manager.handlers
    manager._rank_gone(1)
    assert store.lost == ([1] if backend == "file" else []), "of a rank that ended nothing is mapped"
    assert (store.tier, ()) in manager.publisher._parts
    assert [each.backend for _, each in store.exported] == [backend]
    assert (manager.manager.config.max_queued_events > 0) == given.get("flush_only", False)


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (lambda m: socket_path(77).parent.touch(), "cannot make the directory"),
        (lambda m: m.setattr(Storage, "fails", True), "the storage backend attention_store cannot be used: no licence"),
    ],
)
def test_a_server_whose_store_cannot_be_opened_does_not_start(store, monkeypatch, breaks, reason):
    breaks(monkeypatch)
    with pytest.raises(ConfigError, match=reason):
        stored(monkeypatch, "attention_store")


def test_a_store_that_does_not_work_now_is_left_for_later_and_one_that_cannot_is_refused(store, monkeypatch, caplog):
    def check(chosen):
        raise errors.pop()

    errors = [ConfigError("no such place"), StorageError("no answer")]
    monkeypatch.setattr(engine_patches, "check_settings", check)
    assert stored(monkeypatch).storage is not None
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["the store does not work yet, so the server starts without stored blocks: no answer"]
    with pytest.raises(ConfigError, match="no such place"):
        stored(monkeypatch)


def test_failed_host_copies_are_told_to_the_cache_before_news_reach_the_store(store, monkeypatch):
    manager = stored(monkeypatch)
    copies = [CopyResult(0, *kind, 1, 0, 0.0, (3,), "injected") for kind in (SWAP_OUT, SWAP_IN)]
    reports = [(1, WorkerReport(tuple(copies), 0.0, 0))]
    told = manager.storage.told
    manager.host_copies_failed = lambda failed: told.append(("failed", failed))
    manager.measured = lambda prefills: told.append(("measured", prefills))
    manager.reports = SimpleNamespace(take=lambda: reports)
    told.clear()
    manager.take_reports()
    assert told == [("failed", copies[:1]), ("measured", {1: ()}), ("copies_reported", reports)]


@pytest.mark.parametrize("by", ["reset", "clear_data"])
def test_a_reset_ends_what_waits_outside_fastdeploy_empties_cache_and_store_and_shows_it(store, monkeypatch, by):
    """2.5 has answered those requests with an error by then. Rows go on where FastDeploy clears its data."""
    manager, shown = stored(monkeypatch), []
    manager.publisher.publish_now = lambda: shown.append(len(manager.gpu_free_block_list))
    manager.allocate_gpu_blocks(3, "r")
    manager.held_back._requests.append(object())
    manager.storage.told.clear()
    if by == "reset":
        manager.reset()
    else:
        engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=manager))
        assert engine_patches.clear_data(lambda: "cleared", engine, (), {}) == "cleared"
    assert (shown, len(manager.held_back)) == ([8] * (by == "reset"), 0)
    assert manager.storage.told == [("clear",), *[("rows_dropped",)] * (by == "clear_data"), ("cache_reset",)]


def test_a_request_that_fastdeploy_does_not_take_back_is_not_released_again(store, monkeypatch):
    taken, queued, task = [], [], FakeTask("a", [1])
    storage = SimpleNamespace(release=lambda resources: [task], queued=queued.append)

    def add_request(request):
        taken.append(request)
        raise RuntimeError("injected")

    resources = SimpleNamespace(add_request=add_request, to_be_rescheduled_request_id_set=set())
    with pytest.raises(RuntimeError, match="injected"):
        stored(monkeypatch).release_stored(storage, resources)
    assert (taken, queued) == ([task], [task])


def test_a_request_that_the_store_holds_has_its_id(store, monkeypatch):
    manager, resources = stored(monkeypatch), Server().manager
    manager.storage.holds = lambda request_id: request_id == "held"
    waits = [manager.held_back.hold(resources, SimpleNamespace(request_id=name)) for name in ("held", "other")]
    assert waits == [True, False]


# ---- what a step does, and what is written down


def test_before_it_schedules_the_engine_hears_releases_and_looks_ahead(store, monkeypatch):
    manager, steps, line = stored(monkeypatch, num_cpu_blocks=4), [], [f"r{number}" for number in range(9)]
    for name in ("take_reports", "release_stored", "expect", "send_swaps"):
        monkeypatch.setattr(manager, name, lambda *given, name=name: steps.append((name, *given)))
    manager.publisher.publish = lambda: steps.append(("publish",))
    manager.followers.put_back = lambda instance: steps.append(("put_back",))
    schedule(manager, lambda: steps.append(("schedule",)) or ([], []), line)
    names = "take_reports release_stored expect schedule put_back send_swaps publish"
    assert [name for name, *_ in steps] == names.split()
    assert steps[1][1] == manager.storage
    assert steps[2][1] == line[: manager.manager.config.lookahead_requests]
    assert steps[5][1:] == ([], []), "no row runs"


def test_after_a_weight_update_every_request_starts_again_once_and_there_is_no_batch_before(store, monkeypatch):
    manager, done, epochs = stored(monkeypatch), [], iter([None, 1, 1])
    manager.updates = SimpleNamespace(enter=lambda: next(epochs))
    manager.transit.forget = lambda: done.append("forget")
    manager.batch_dropped = lambda: done.append("batch_dropped")
    manager.storage.weights_changed = lambda: done.append("weights_changed")
    manager.release_stored = manager.publisher.publish = lambda *_: None
    monkeypatch.setattr(engine_patches, "start_again", lambda resources: done.append("start_again"))
    for expected in ([], ["start_again", "forget", "batch_dropped", "weights_changed", "schedule"], ["schedule"]):
        done.clear()
        assert schedule(manager, lambda: done.append("schedule") or ([], [])) == ([], [])
        assert done == expected


def test_what_the_queue_says_of_a_batch_is_passed_on():
    server = Server()
    server.add("a", [1] * 4)
    batch = server.manager.schedule()[0]
    assert engine_patches.put_tasks(lambda tasks: "put", None, ((batch, 1),), {}) == "put"


SWAP = {"host_block_bytes": 123 << 20, "swap_space": 1.0, "tensor_parallel_size": 2}


@pytest.mark.parametrize("caching", [True, False])
def test_the_log_says_once_what_serves_and_what_swap_space_bought(fake_fastdeploy, monkeypatch, caplog, caching):
    monkeypatch.setattr(engine_patches.swap_space, "require_host_memory", lambda config: None)
    with caplog.at_level("INFO"):
        manager = engine_patches.EnginePrefixCache(fd_config(**FLAGS_AT_REST, **SWAP, enable_prefix_caching=caching))
        manager.update_cache_config(SimpleNamespace(total_block_num=33))  # profiling found the size
        for _ in range(2):
            launch(manager)
    sizes = "4 host blocks of 128974848 bytes on each of 2 tensor-parallel ranks, 0.961 GiB in all"
    lines = ["33 device blocks and 4 host blocks of 4 tokens, write policy write_back, eviction policy lru, store none"]
    if not caching:
        lines = ["prefix caching is off"]
    serves = f"fastdeploy-kvcache-v1 {__version__} is the cache manager of FastDeploy 2.6: {lines[0]}"
    off = [f"{flag} has no effect: prefix caching is off" for flag in ("--swap-space 1.0", "--eviction-policy lru")]
    assert caplog.messages == [*([] if caching else off), f"--swap-space 1 GiB: {sizes}", serves]


def test_the_line_of_the_start_names_store_and_threshold(store, monkeypatch):
    manager = stored(monkeypatch, write_policy="write_through_selective", write_through_threshold=3)
    assert "write policy write_through_selective (at hit 3), eviction policy lru, store file" in manager.describe()


def test_a_trace_is_recorded_where_the_environment_says(fake_fastdeploy, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "trace.jsonl"))
    with caplog.at_level("INFO"):
        manager = launched()
    assert manager.traced is not None
    recorder, _ = manager.publisher._parts[-1]
    assert f"recording a trace of the requests in {recorder.path}" in caplog.messages
    recorder.close()
