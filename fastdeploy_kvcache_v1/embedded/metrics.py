"""What `/metrics` shows: the rows of the metric table, in a registry of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..metadata import CopyPath
from ..metric_table import (
    COPY_OP,
    COPY_PATH,
    STORAGE_BUCKETS_S,
    STORAGE_LATENCY,
    TABLE,
    TIME_TO_FIRST_TOKEN,
    Kind,
    Metric,
    Source,
)
from ..scheduler.cache_stats import CacheStats
from ..storage.engine.tier import StorageTier
from ..trace_recorder import TraceRecorder
from .engine.engine_counters import EngineCounters
from .engine.peer_requests import PeerRequests

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True)
class Snapshot:
    """One look at the engine for one scrape."""

    cache: CacheStats
    engine: EngineCounters
    num_running: int
    num_waiting: int
    storage: StorageTier | None = None
    recorder: TraceRecorder | None = None
    peers: PeerRequests | None = None

    def objects(self, source: Source) -> Iterable[tuple[tuple[str, ...], object]]:
        """Objects of `source`, each with the values of the labels that the source adds."""
        match source:
            case Source.COUNTERS:
                return [((), self.cache.counters)]
            case Source.STATS:
                return [((), self.cache)]
            case Source.COPIES:
                return [((str(rank),), copies) for rank, copies in enumerate(self.engine.copies)]
            case Source.STORAGE:
                return [] if self.storage is None else [((), self.storage)]
            case Source.TRACE:
                return [] if self.recorder is None else [((), self.recorder)]
            case Source.TRANSFERS:
                sides = () if self.peers is None else self.peers.sides
                return [((name,), side.ledger) for name, side in sides]
            case Source.REMOTE_PREFILLS:
                remote = None if self.peers is None else self.peers.remote
                return [] if remote is None else [((), remote.counters)]
            case Source.REPORTS | Source.OVERLAY | Source.GRANTS:
                return []
            case Source.ENGINE:
                return [((), self)]


class Metrics:
    """The registry. What is observed may be observed from any thread."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        copy_ops: Mapping[str, str] | None = None,
        copy_paths: Iterable[Iterable[CopyPath]] = (),
    ) -> None:
        """`copy_ops`: name of the implementation behind every copy op of the worker. `copy_paths`: how each
        rank copies.
        """
        self._registry = CollectorRegistry()
        live = Gauge(COPY_OP.full_name, COPY_OP.help, COPY_OP.label_names, registry=self._registry)
        for op, implementation in (copy_ops or {}).items():
            live.labels(op, implementation).set(1)
        paths = Gauge(COPY_PATH.full_name, COPY_PATH.help, COPY_PATH.label_names, registry=self._registry)
        for rank, ways in enumerate(copy_paths):
            for path in ways:
                paths.labels(*path, rank).set(0 if path.left else 1)
        self._registry.register(_SnapshotCollector(snapshot))
        self._first_token = Histogram(
            TIME_TO_FIRST_TOKEN.full_name, TIME_TO_FIRST_TOKEN.help, buckets=TTFT_BUCKETS, registry=self._registry
        )

        self._storage = Histogram(
            STORAGE_LATENCY.full_name,
            STORAGE_LATENCY.help,
            STORAGE_LATENCY.label_names,
            buckets=STORAGE_BUCKETS_S,
            registry=self._registry,
        )

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_storage(self, operation: str, seconds: float) -> None:
        self._storage.labels(operation).observe(seconds)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        now = self._snapshot()
        families: dict[str, Family] = {}
        for metric in TABLE:
            family = families.setdefault(metric.name, _family(metric))
            for added, source in now.objects(metric.source):
                family.add_metric([*metric.labels.values(), *added], metric.value(source))
        yield from families.values()


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return kind(metric.full_name, metric.help, labels=metric.label_names)
