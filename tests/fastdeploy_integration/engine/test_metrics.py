from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest

from fastdeploy_kvcache_v1.contract.copy_totals import RankCopies
from fastdeploy_kvcache_v1.contract.messages import EVICT, CopyPath, TransferReport, TransferResult
from fastdeploy_kvcache_v1.fastdeploy_integration.copy_report import CopyReport
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import metrics
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.uncached import Uncached
from fastdeploy_kvcache_v1.scheduler.cache_stats import CacheStats, Counters
from fastdeploy_kvcache_v1.telemetry.metric_table import PREFIX, Kind, Source, rows


@pytest.fixture
def samples(monkeypatch):
    """All samples by name and labels, of a registry of the test's own."""
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=registry))
    metrics.exported.cache_clear()
    metrics.copy_path.cache_clear()
    yield lambda: {
        (sample.name.removeprefix(PREFIX), *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    metrics.exported.cache_clear()
    metrics.copy_path.cache_clear()


class CountingManager:
    """Every number of its next snapshot is another one."""

    def __init__(self):
        self.counters = Counters(**dict(zip(vars(Counters()), range(100, 200), strict=False)))

    def stats(self):
        names = [name for name in CacheStats.__dataclass_fields__ if name != "counters"]
        return CacheStats(self.counters, **dict(zip(names, range(200, 300), strict=False)))


@pytest.fixture
def publisher(samples, monkeypatch):
    monkeypatch.setattr(metrics, "PUBLISH_EVERY_S", 0.0)
    adapter = SimpleNamespace(manager=CountingManager(), uncached=Uncached(1, 2, 3, 4))
    overlay = SimpleNamespace(num_changed_bodies=3)
    return metrics.CacheMetricsPublisher(adapter, overlay)


def test_every_row_of_the_scheduler_half_is_published_with_its_own_number(publisher, samples):
    publisher.publish()
    stats = publisher._adapter.manager.stats()
    expected = (
        {("copy_reports_lost_total",): 0, ("copy_reports_unreadable_total",): 0}
        | {("changed_bodies",): 3}
        | {("uncached_requests_total", ("reason", name)): value for name, value in vars(Uncached(1, 2, 3, 4)).items()}
        | {
            (metric.name + ("_total" if metric.kind is Kind.COUNTER else ""),): metric.value(source)
            for source, metric in [
                *((stats, metric) for metric in rows(Source.STATS)),
                *((stats.counters, metric) for metric in rows(Source.COUNTERS)),
            ]
        }
    )
    assert samples() == expected


def test_counters_grow_by_what_is_new_and_never_fall(publisher, samples):
    counters = publisher._adapter.manager.counters
    for value, shown in ((5, 5), (7, 7), (6, 7), (9, 9)):
        counters.query_tokens = value
        publisher.publish()
        assert samples()["query_tokens_total",] == shown


def test_a_last_look_before_a_pause_does_not_wait_for_its_turn(publisher, samples, monkeypatch):
    monkeypatch.setattr(metrics, "PUBLISH_EVERY_S", 1e9)
    publisher.publish()
    before = samples()
    publisher._adapter.manager.counters.requests_admitted += 5
    publisher.publish()
    assert samples() == before
    publisher.publish_now()
    changed = {name: value - before[name] for name, value in samples().items() if value != before[name]}
    assert changed == {("requests_admitted_total",): 5}


def test_a_worker_that_takes_over_a_rank_adds_to_what_was_counted(publisher, samples):
    first, second = (CopyReport(0, worker, 0, RankCopies()) for worker in ("first", "second"))
    publisher.reports = SimpleNamespace(latest=lambda: (first, second), num_lost=7, num_unreadable=8)
    publisher.publish()
    assert [samples()[f"copy_reports_{kind}_total",] for kind in ("lost", "unreadable")] == [7, 8]
    for report, blocks, shown in ((first, 3, 3), (first, 2, 5), (second, 4, 9)):
        report.copies.add(TransferReport((TransferResult(0, *EVICT, blocks, 0, 0.0),)))
        for _ in range(2):
            publisher.publish()
        assert samples()["swap_blocks_total", ("direction", "out"), ("rank", "0")] == shown


def test_the_ways_of_copying_are_shown_until_others_take_their_place(publisher, samples):
    """Also those of the process that took over the rank."""

    def shown(worker, *paths):
        report = CopyReport(1, worker, 0, RankCopies(), paths=tuple(CopyPath("in", *path) for path in paths))
        publisher.reports = SimpleNamespace(latest=lambda: [report], num_lost=0, num_unreadable=0)
        publisher.publish()
        labelled = [(dict(labels), sample) for (name, *labels), sample in samples().items() if name == "copy_path"]
        assert all((each["direction"], each["rank"]) == ("in", "1") for each, _ in labelled)
        return {(each["path"], each["reason"]): sample for each, sample in labelled}

    assert shown("first", ["kernel"], ["batch", "no"]) == {("kernel", ""): 1, ("batch", "no"): 0}
    left = {("kernel", ""): 0, ("kernel", "late"): 0, ("batch", "no"): 0}
    assert shown("second", ["kernel", "late"], ["runs"]) == {**left, ("runs", ""): 1}


@pytest.mark.parametrize("source", [Source.TRANSFERS, Source.STORAGE, Source.TRACE])
def test_numbers_of_a_part_are_shown_where_there_is_one_and_those_of_a_role_with_its_side(publisher, samples, source):
    class Ledger(float):
        def __getattr__(self, name):
            return self

    caches = metrics.exported_role, metrics.exported_storage, metrics.exported_trace
    for cache in caches:
        cache.cache_clear()
    if source is Source.TRANSFERS:
        publisher.role = "decode", {source: Ledger(7)}
    else:
        setattr(publisher, "storage" if source is Source.STORAGE else "recorder", Ledger(7))
    publisher.publish()
    for cache in caches:
        cache.cache_clear()
    shown = [labels for (_, *labels), value in samples().items() if value == 7]
    assert len(shown) == len(rows(source))
    assert source is not Source.TRANSFERS or all(("side", "decode") in labels for labels in shown)


def test_latencies_of_the_store_are_a_histogram_by_operation(samples, monkeypatch):
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "Histogram", partial(prometheus_client.Histogram, registry=registry))
    metrics.storage_latency.cache_clear()
    for seconds in (0.002, 0.3):
        metrics.observe_storage("load", seconds)
    metrics.storage_latency.cache_clear()
    name = f"{PREFIX}storage_latency_seconds"
    assert registry.get_sample_value(f"{name}_count", {"operation": "load"}) == 2
    assert registry.get_sample_value(f"{name}_bucket", {"operation": "load", "le": "0.25"}) == 1
