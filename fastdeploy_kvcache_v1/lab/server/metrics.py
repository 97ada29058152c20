"""The content of `/metrics`: numbers of the engine's parts, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ...telemetry.metrics import Kind, Metric, observe, source_of
from .engine.engine_core import EngineCore
from .field_names import FieldCheck

Family = CounterMetricFamily | GaugeMetricFamily


class Metrics:
    """The registry. Thread-safe."""

    def __init__(self, core: EngineCore, fields: FieldCheck) -> None:
        """`core` and its parts report their latencies from now on."""
        self._registry = CollectorRegistry()
        self._registry.register(_ServerCollector(core, fields))
        for part, _ in parts(core):
            for each in source_of(part).histograms:
                shown = Histogram(
                    each.full_name, each.help, each.label_names, buckets=each.buckets, registry=self._registry
                )
                setattr(part, each.attribute, partial(observe, shown))

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _ServerCollector(Collector):
    def __init__(self, core: EngineCore, fields: FieldCheck) -> None:
        self._core, self._fields = core, fields

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for part, added in ((self._fields, ()), *parts(self._core)):
            for metric in source_of(part).numbers:
                family = families.setdefault(metric.name, _family(metric))
                for labels, value in metric.samples(part):
                    family.add_metric([*labels, *added], value)
        yield from families.values()


def parts(core: EngineCore) -> Iterator[tuple[object, tuple[str, ...]]]:
    """Exported objects, each with the values of the labels that the server adds."""
    yield core.manager.stats(), ()
    yield core.manager.misses, ()
    yield core, ()
    remote = core.peers.remote
    for part in (core.storage, core.recorder, None if remote is None else remote.counters):
        if part is not None:
            yield part, ()
    for side, peers in core.peers.sides:
        yield peers.ledger, (side,)
    for rank, copies in enumerate(core.counters.copies):
        yield copies, (str(rank),)


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return kind(metric.full_name, metric.help, labels=metric.label_names)
