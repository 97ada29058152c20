"""The numbers of the engine's parts, beside FastDeploy's own metrics, which the adapter keeps feeding."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from ...contract.messages import RankCopies
from ...forks import look_for_lock_of_values
from ...link.reports import Reports
from ...scheduler.cache_stats import CacheStats
from ...telemetry.metrics import Kind, Metric, Source, observe, source_of
from ..overlay.overlay import Overlay
from .adapter import PrefixCacheAdapter

PUBLISH_EVERY_S = 0.1


class Exported:
    """The metrics of a source in the Prometheus directory, whose content FastDeploy collects from its processes.

    Names can be registered once per process. Any thread, one at a time.
    """

    def __init__(self, source: Source) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def register(metric: Metric) -> Any:
            name, text, labels = metric.full_name, metric.help, metric.label_names
            if metric.kind is Kind.HISTOGRAM:
                return Histogram(name, text, labels, buckets=metric.buckets)
            if metric.kind is Kind.COUNTER:
                return Counter(name, text, labels)
            # Engines of one server have their own blocks and requests, and the same ways of copying.
            return Gauge(name, text, labels, multiprocess_mode="livemax" if metric.each else "livesum")

        look_for_lock_of_values()
        by_name = {metric.name: metric for metric in (*source.numbers, *source.histograms)}
        self._collectors = {name: register(metric) for name, metric in by_name.items()}
        self._source = source
        self._seen: defaultdict[tuple[Metric, tuple[str, ...]], set[tuple[str, ...]]] = defaultdict(set)
        """Values of the labels `each`, by the added ones."""

    def publish(self, part: object, added: tuple[str, ...], counted: dict[Metric, float]) -> None:
        """Show the numbers of `part`. `added`: values of the labels that the source leaves to the server.

        `counted` is what counters of this object have shown so far: one that falls is left as it is. A sample of `each`
        that is there no more stays in sight with the value 0.
        """
        for metric in self._source.numbers:
            samples = dict(metric.samples(part))
            if metric.each:
                seen = self._seen[metric, added]
                seen.update(samples)
                samples = {**dict.fromkeys(seen, 0), **samples}
            for labels, value in samples.items():
                collector = self._collectors[metric.name]
                sample = collector.labels(*labels, *added) if metric.label_names else collector
                if metric.kind is Kind.GAUGE:
                    sample.set(value)
                elif (growth := value - counted.get(metric, 0)) > 0:  # taking back an admission lowers some
                    sample.inc(growth)
                    counted[metric] = value

    def observe(self, part: object) -> None:
        """What `part` observes is shown from now on."""
        for metric in self._source.histograms:
            setattr(part, metric.attribute, partial(observe, self._collectors[metric.name]))


@cache
def exported(source: Source) -> Exported:
    """Of this process. Only what the server has is registered."""
    return Exported(source)


class CacheMetricsPublisher:
    """Publishes one adapter's numbers, at most ten times a second: a snapshot costs some 20 us in the schedule loop.

    Thread-safe.
    """

    def __init__(self, adapter: PrefixCacheAdapter, overlay: Overlay) -> None:
        self._adapter = adapter
        self._parts: list[tuple[object, tuple[str, ...]]] = []
        self._counted: defaultdict[str, dict[Metric, float]] = defaultdict(dict)
        """By rank."""
        self.reports: Reports | None = None
        """Of worker ranks; None until there is a link to them."""
        self._next = 0.0
        self._lock = threading.Lock()
        for source in (CacheStats, RankCopies):
            exported(source_of(source))
        for part in (adapter.manager.misses, overlay, adapter.uncached):
            self.add(part)

    def add(self, part: object, *added: str) -> None:
        """Publish the numbers of `part`, and what it observes. `added`: see `Exported.publish`."""
        exported(source_of(part)).observe(part)
        self._parts.append((part, added))

    def publish(self) -> None:
        if time.monotonic() >= self._next:
            self.publish_now()

    def publish_now(self) -> None:
        """Before a time in which nothing is scheduled."""
        with self._lock:
            self._next = time.monotonic() + PUBLISH_EVERY_S
            self._publish()

    def parts(self) -> Iterator[tuple[object, tuple[str, ...]]]:
        """Exported objects as in `add`, those of workers too."""
        return ((part, added) for part, added, _ in self._of_ranks())

    def _publish(self) -> None:
        for part, added, rank in self._of_ranks():
            exported(source_of(part)).publish(part, added, self._counted[rank])

    def _of_ranks(self) -> Iterator[tuple[object, tuple[str, ...], str]]:
        """Yield exported objects with added labels and the rank, which is empty for the engine."""
        for part, added in ((self._adapter.manager.stats(), ()), *self._parts):
            yield part, added, ""
        if self.reports is not None:
            for rank, copies in list(self.reports.copies.items()):
                yield copies, (str(rank),), str(rank)
