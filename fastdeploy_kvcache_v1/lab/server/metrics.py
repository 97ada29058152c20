"""What `/metrics` shows: the rows of the metric table, in a registry of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ...contract.messages import CopyPath
from ...scheduler.cache_stats import CacheStats
from ...telemetry.metric_table import (
    COPY_PATH,
    STORAGE_BUCKETS_S,
    STORAGE_LATENCY,
    TABLE,
    TIME_TO_FIRST_TOKEN,
    Kind,
    Metric,
    Source,
)
from .engine.engine_core import EngineCore

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Family = CounterMetricFamily | GaugeMetricFamily


class Metrics:
    """The registry. What is observed may be observed from any thread."""

    def __init__(self, core: EngineCore, *, copy_paths: Iterable[Iterable[CopyPath]] = ()) -> None:
        """`core` tells its latencies from now on. `copy_paths`: how each rank copies."""
        self._registry = CollectorRegistry()
        paths = Gauge(COPY_PATH.full_name, COPY_PATH.help, COPY_PATH.label_names, registry=self._registry)
        for rank, ways in enumerate(copy_paths):
            for path in ways:
                paths.labels(*path, rank).set(0 if path.left else 1)
        self._registry.register(_CoreCollector(core))
        core.observe_first_token = self._histogram(TIME_TO_FIRST_TOKEN, TTFT_BUCKETS).observe
        latency = self._histogram(STORAGE_LATENCY, STORAGE_BUCKETS_S)
        if core.storage is not None:
            core.storage.observe_latency = lambda operation, seconds: latency.labels(operation).observe(seconds)

    def _histogram(self, row: Metric, buckets: Sequence[float]) -> Histogram:
        return Histogram(row.full_name, row.help, row.label_names, buckets=buckets, registry=self._registry)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _CoreCollector(Collector):
    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Family]:
        stats = self._core.manager.stats()
        families: dict[str, Family] = {}
        for metric in TABLE:
            family = families.setdefault(metric.name, _family(metric))
            for added, source in _objects(self._core, stats, metric.source):
                family.add_metric([*metric.labels.values(), *added], metric.value(source))
        yield from families.values()


def _objects(core: EngineCore, stats: CacheStats, source: Source) -> Iterable[tuple[tuple[str, ...], object]]:
    """Objects of `source`, each with the values of the labels that the source adds."""
    match source:
        case Source.COUNTERS:
            return [((), stats.counters)]
        case Source.STATS:
            return [((), stats)]
        case Source.COPIES:
            return [((str(rank),), copies) for rank, copies in enumerate(core.counters.copies)]
        case Source.STORAGE:
            return [] if core.storage is None else [((), core.storage)]
        case Source.TRACE:
            return [] if core.recorder is None else [((), core.recorder)]
        case Source.TRANSFERS:
            return [((name,), side.ledger) for name, side in core.peers.sides]
        case Source.REMOTE_PREFILLS:
            return [] if core.peers.remote is None else [((), core.peers.remote.counters)]
        case Source.ENGINE:
            return [((), core)]
        case Source.REPORTS | Source.OVERLAY | Source.UNCACHED | Source.GRANTS:
            return []


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return kind(metric.full_name, metric.help, labels=metric.label_names)
