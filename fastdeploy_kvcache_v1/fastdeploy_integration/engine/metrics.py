"""The rows of the metric table, beside FastDeploy's own metrics, which the adapter keeps feeding."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ...contract.messages import CopyPath
from ...forks import look_for_lock_of_values
from ...storage.engine.tier import StorageTier
from ...telemetry.metric_table import COPY_PATH, STORAGE_BUCKETS_S, STORAGE_LATENCY, Kind, Metric, Source, rows
from ...telemetry.trace_recorder import TraceRecorder
from ..copy_report import CopyReport
from ..overlay.overlay import Overlay
from .adapter import PrefixCacheAdapter
from .copy_reports import CopyReports

PUBLISH_EVERY_S = 0.1


class Exported:
    """The rows of some sources in the Prometheus directory, whose content FastDeploy collects from its processes.

    Names can be registered once per process. Any thread, one at a time.
    """

    def __init__(self, *sources: Source) -> None:
        from prometheus_client import Counter, Gauge

        def register(metric: Metric) -> Any:
            if metric.kind is Kind.GAUGE:
                return Gauge(metric.full_name, metric.help, metric.label_names, multiprocess_mode="livesum")
            return Counter(metric.full_name, metric.help, metric.label_names)

        look_for_lock_of_values()
        by_name = {metric.name: metric for metric in rows(*sources)}
        collectors = {name: register(metric) for name, metric in by_name.items()}
        self._rows = {source: [(metric, collectors[metric.name]) for metric in rows(source)] for source in sources}

    def publish(self, source: Source, values: object, published: dict[Metric, float], **labels: str) -> None:
        """Show the numbers of `values`, an object of `source`; `labels` are those that the source adds.

        `published` is what this object has shown so far: a number that falls leaves its counter as it is.
        """
        for metric, collector in self._rows[source]:
            sample = collector.labels(**metric.labels, **labels) if metric.label_names else collector
            value = metric.value(values)
            if metric.kind is Kind.GAUGE:
                sample.set(value)
            elif (growth := value - published.get(metric, 0)) > 0:  # taking back an admission lowers some
                sample.inc(growth)
                published[metric] = value


@lru_cache(maxsize=1)
def exported() -> Exported:
    """Of this process: what the scheduler half counts, what worker ranks say of their copies, what the overlay sees."""
    return Exported(Source.COUNTERS, Source.STATS, Source.COPIES, Source.REPORTS, Source.OVERLAY, Source.UNCACHED)


@lru_cache(maxsize=1)
def exported_storage() -> Exported:
    """Likewise, only where there is storage."""
    return Exported(Source.STORAGE)


@lru_cache(maxsize=1)
def exported_trace() -> Exported:
    """Likewise, only where a trace is recorded."""
    return Exported(Source.TRACE)


@lru_cache(maxsize=2)
def exported_role(source: Source) -> Exported:
    """Likewise, only in a prefill or decode server that has it."""
    return Exported(source)


@lru_cache(maxsize=1)
def storage_latency() -> Any:
    """Of this process: the histogram, by operation."""
    from prometheus_client import Histogram

    name, text = STORAGE_LATENCY.full_name, STORAGE_LATENCY.help
    return Histogram(name, text, STORAGE_LATENCY.label_names, buckets=STORAGE_BUCKETS_S)


@lru_cache(maxsize=1)
def copy_path() -> Any:
    """Of this process: which ways of copying live. Several engines of one server show the same."""
    from prometheus_client import Gauge

    return Gauge(COPY_PATH.full_name, COPY_PATH.help, COPY_PATH.label_names, multiprocess_mode="livemax")


def observe_storage(operation: str, seconds: float) -> None:
    """One request to the store took so long."""
    storage_latency().labels(operation).observe(seconds)


class CacheMetricsPublisher:
    """Publishes one adapter's numbers, at most ten times a second: a snapshot costs some 20 us in the schedule loop.

    Thread-safe.
    """

    def __init__(self, adapter: PrefixCacheAdapter, overlay: Overlay) -> None:
        self._adapter, self._overlay = adapter, overlay
        self._exported = exported()
        self._published: dict[Metric, float] = {}
        self._published_copies: defaultdict[str, dict[Metric, float]] = defaultdict(dict)
        self._shown_paths: dict[int, tuple[CopyPath, ...]] = {}
        """By rank."""
        self.reports: CopyReports | None = None
        """What worker processes say; None until there is a way back from them."""
        self.storage: StorageTier | None = None
        """None without storage."""
        self.recorder: TraceRecorder | None = None
        """None where no trace is recorded."""
        self.role: tuple[str, Mapping[Source, object]] | None = None
        """Which side of transfers a prefill or decode server is, and its objects; None in others."""
        self._next = 0.0
        self._lock = threading.Lock()

    def publish(self) -> None:
        if time.monotonic() >= self._next:
            self.publish_now()

    def publish_now(self) -> None:
        """Before a time in which nothing is scheduled."""
        with self._lock:
            self._next = time.monotonic() + PUBLISH_EVERY_S
            self._publish()

    def _publish(self) -> None:
        stats = self._adapter.manager.stats()
        self._exported.publish(Source.STATS, stats, self._published)
        self._exported.publish(Source.COUNTERS, stats.counters, self._published)
        self._exported.publish(Source.OVERLAY, self._overlay, self._published)
        self._exported.publish(Source.UNCACHED, self._adapter.uncached, self._published)
        if self.storage is not None:
            exported_storage().publish(Source.STORAGE, self.storage, self._published)
        if self.recorder is not None:
            exported_trace().publish(Source.TRACE, self.recorder, self._published)
        if self.role is not None:
            side, objects = self.role
            for source, values in objects.items():
                exported_role(source).publish(source, values, self._published, **dict.fromkeys(source.labels, side))
        if self.reports is not None:
            self._publish_reports(self.reports)

    def _publish_reports(self, reports: CopyReports) -> None:
        self._exported.publish(Source.REPORTS, reports, self._published)
        for report in reports.latest():
            shown = self._published_copies[report.worker]  # a process that took over a rank counts from 0 again
            self._exported.publish(Source.COPIES, report.copies, shown, rank=str(report.rank))
            self._publish_paths(report)

    def _publish_paths(self, report: CopyReport) -> None:
        """A path that left, or another process of the rank lacks, stays in sight with the value 0."""
        before = self._shown_paths.get(report.rank, ())
        if report.paths == before:
            return
        for path in {*before} - {*report.paths}:
            copy_path().labels(*path, str(report.rank)).set(0)
        for path in report.paths:
            copy_path().labels(*path, str(report.rank)).set(0 if path.left else 1)
        self._shown_paths[report.rank] = report.paths
