import logging
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_OUT, CopyPath, CopyResult, RankCopies
from fastdeploy_kvcache_v1.contract.misses import MissReason
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.grants import Grants
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import metrics
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.uncached import Uncached
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay
from fastdeploy_kvcache_v1.scheduler.cache_stats import CacheStats, Counters, MissedTokens
from fastdeploy_kvcache_v1.scheduler.traffic.misses import Misses
from fastdeploy_kvcache_v1.storage.engine.counters import MoveTotals, StorageCounters
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.telemetry.metrics import PREFIX, Kind, source_of
from fastdeploy_kvcache_v1.telemetry.trace_recorder import TraceRecorder
from fastdeploy_kvcache_v1.transfer.ledger import FetchLedger, LeaseLedger
from tests.telemetry.metrics_page import sources


def named(metric):
    return metric.name + ("_total" if metric.kind is Kind.COUNTER else "")


@pytest.fixture
def samples(monkeypatch):
    """All samples by name and labels, of a registry of the test's own."""
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=registry))
    metrics.exported.cache_clear()
    yield lambda: {
        (sample.name.removeprefix(PREFIX), *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    metrics.exported.cache_clear()


class CountingManager:
    """Every number of its next snapshot is another one."""

    def __init__(self):
        self.counters = Counters(*range(100, 100 + len(vars(Counters()))))
        self.misses = bare(Misses, tokens=MissedTokens(*range(len(MissReason))))

    def stats(self):
        names = [name for name in CacheStats.__dataclass_fields__ if name != "counters"]
        return CacheStats(counters=self.counters, **dict(zip(names, range(200, 300), strict=False)))


def bare(cls, **numbers):
    """An object without what makes it work."""
    made = cls.__new__(cls)
    vars(made).update(numbers)
    return made


@pytest.fixture
def publisher(samples, monkeypatch):
    monkeypatch.setattr(metrics, "PUBLISH_EVERY_S", 0.0)
    adapter = SimpleNamespace(manager=CountingManager(), uncached=Uncached(1, 2, 3, 4))
    return metrics.CacheMetricsPublisher(adapter, bare(Overlay, num_changed_bodies=3))


def reports(copies, rank=0):
    return SimpleNamespace(copies={rank: copies})


def test_each_number_of_the_scheduler_half_is_published_under_its_name(publisher, samples):
    publisher.publish()
    stats = publisher._adapter.manager.stats()
    expected = {(named(each),): value for each in source_of(stats).numbers for _, value in each.samples(stats)}
    numbers = {name: number for name, number in vars(stats).items() if name != "counters"} | vars(stats.counters)
    assert sorted(expected.values()) == sorted(numbers.values()), "each is a field"
    reasons = vars(Uncached(1, 2, 3, 4)).items()
    uncached = {("uncached_requests_total", ("reason", name)): value for name, value in reasons}
    misses = publisher._adapter.manager.misses
    missed = {
        ("missed_tokens_total", ("reason", reason.value)): getattr(misses.tokens, reason.value) for reason in MissReason
    }
    shown = {name: value for name, value in samples().items() if not name[0].startswith("evicted_to_next_use")}
    assert shown == expected | missed | uncached | {("changed_bodies",): 3}


def test_every_metric_that_the_docs_have_of_fastdeploy_is_published(publisher, samples, tmp_path):
    """Of a server that has every part."""
    moved, paths = MoveTotals(1, 1, 1.0, 1), (CopyPath("in", "spans"),)
    tier = bare(StorageTier, counters=StorageCounters(moved, moved))
    tier._fetches = SimpleNamespace(num_waiting_requests=1, is_left_alone=True)
    recorder = TraceRecorder(tmp_path / "trace", 16, log=logging.getLogger())
    recorder.close()
    for part, *added in (
        (tier,),
        (recorder,),
        (LeaseLedger(), "prefill"),
        (bare(Grants, _grants={}, _parked={}, num_stray_tokens=0),),
    ):
        publisher.add(part, *added)
    tier.observe_latency("load", 0.25)
    publisher.reports = reports(RankCopies(paths=paths))
    publisher.publish()
    shown = {name for name, *_ in samples()}
    here = [each for each in sources() if each.servers != "embedded server"]
    assert {named(each) for source in here for each in source.numbers} - shown == set()
    assert samples()["storage_latency_seconds_bucket", ("le", "0.25"), ("operation", "load")] == 1
    assert samples()["storage_latency_seconds_bucket", ("le", "0.1"), ("operation", "load")] == 0


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


def test_what_a_rank_copied_is_counted_once(publisher, samples):
    copies = RankCopies()
    publisher.reports = reports(copies, rank=3)
    for blocks, shown in ((3, 3), (2, 5)):
        copies.add(CopyResult(0, *SWAP_OUT, blocks, 0, 0.0))
        for _ in range(2):
            publisher.publish()
        assert samples()["swap_blocks_total", ("direction", "out"), ("rank", "3")] == shown


def test_ways_of_copying_are_shown_until_others_take_their_place(publisher, samples):
    def shown(*paths):
        publisher.reports = reports(RankCopies(paths=tuple(CopyPath("in", *path) for path in paths)), rank=1)
        publisher.publish()
        labelled = [(dict(labels), sample) for (name, *labels), sample in samples().items() if name == "copy_path"]
        assert all((each["direction"], each["rank"]) == ("in", "1") for each, _ in labelled)
        return {(each["path"], each["reason"]): sample for each, sample in labelled}

    assert shown(["kernel"], ["batch", "no"]) == {("kernel", ""): 1, ("batch", "no"): 0}
    left = {("kernel", ""): 0, ("kernel", "late"): 0, ("batch", "no"): 0}
    assert shown(["kernel", "late"], ["spans"]) == {**left, ("spans", ""): 1}


@pytest.mark.parametrize(("ledger", "side"), [(LeaseLedger, "prefill"), (FetchLedger, "decode")])
def test_numbers_of_a_role_have_its_side(publisher, samples, ledger, side):
    made = ledger()
    made.totals.arrived = 7
    publisher.add(made, side)
    publisher.publish()
    assert samples()["transfers_ended_total", ("outcome", "arrived"), ("side", side)] == 7
