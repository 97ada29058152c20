"""What `/metrics` shows, in a registry of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...scheduler.cache_stats import CacheStats
from ..engine.engine_core import EngineCounters

PREFIX = "fastdeploy_kvcache_"
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Snapshot:
    """One look at the engine for one scrape."""

    cache: CacheStats
    engine: EngineCounters
    num_running: int
    num_waiting: int
    num_preemptions: int


class Metrics:
    """The registry. `observe_first_token` may be called from any thread."""

    def __init__(self, snapshot: Callable[[], Snapshot], *, copy_ops: Mapping[str, str] | None = None) -> None:
        """`copy_ops`: name of the implementation behind every copy op of the worker."""
        self._registry = CollectorRegistry()
        live = Gauge(
            f"{PREFIX}copy_op",
            "1 for the implementation that is live behind each copy op of the worker",
            ["op", "implementation"],
            registry=self._registry,
        )
        for op, implementation in (copy_ops or {}).items():
            live.labels(op, implementation).set(1)
        self._registry.register(_EngineCollector(snapshot))
        self._first_token = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=TTFT_BUCKETS,
            registry=self._registry,
        )

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield from _cache_metrics(now.cache)
        yield from _copy_metrics(now.engine)
        engine = now.engine
        yield _gauge("requests", "Requests by queue", "state", running=now.num_running, waiting=now.num_waiting)
        yield _counter(
            "preemptions", "Requests preempted for lack of device blocks or after a failed copy", now.num_preemptions
        )
        yield _labelled_counter(
            "requests_ended", "Requests by how they ended", "outcome",
            finished=engine.finished, aborted=engine.aborted, failed=engine.failed,
        )  # fmt: skip
        yield _counter("steps", "Batches sent to the worker", engine.steps)
        yield _counter("computed_tokens", "Tokens that went through the model", engine.computed_tokens)
        yield _counter("generated_tokens", "Tokens sampled", engine.generated_tokens)


def _cache_metrics(cache: CacheStats) -> Iterator[Metric]:
    counters = cache.counters
    yield _labelled_counter(
        "prompt_tokens",
        "Tokens of admitted requests by where their KV came from; a request whose copy failed counts only when it is "
        "admitted again",
        "source",
        device=counters.device_hit_tokens, host=counters.host_hit_tokens, recomputed=cache.recomputed_tokens,
    )  # fmt: skip
    yield _counter(
        "resumed_tokens", "Tokens that preempted requests found again when they resumed", counters.resumed_hit_tokens
    )
    blocks = GaugeMetricFamily(f"{PREFIX}blocks", "Blocks by tier and use", labels=["tier", "state"])
    device_used = cache.device_blocks - cache.device_free_blocks - cache.device_evictable_blocks
    for tier, used, cached, free in (
        ("device", device_used, cache.device_cached_blocks, cache.device_free_blocks),
        ("host", cache.host_blocks - cache.host_free_blocks, cache.host_cached_blocks, cache.host_free_blocks),
    ):
        for state, value in (("used", used), ("cached", cached), ("free", free)):
            blocks.add_metric([tier, state], value)
    yield blocks
    yield _labelled_counter(
        "evicted_blocks", "Blocks that gave up their slot in a tier to make room", "tier",
        device=counters.device_evicted_blocks, host=counters.host_evicted_blocks,
    )  # fmt: skip
    yield _counter("lost_blocks", "Blocks evicted from the device without a host copy", counters.device_lost_blocks)


def _copy_metrics(engine: EngineCounters) -> Iterator[Metric]:
    out, back = engine.swap_out, engine.swap_in
    yield _labelled_counter("swap_blocks", "Blocks copied", "direction", out=out.blocks, **{"in": back.blocks})
    yield _labelled_counter("swap_bytes", "Bytes copied", "direction", out=out.bytes, **{"in": back.bytes})
    yield _labelled_counter("swap_seconds", "Time spent copying", "direction", out=out.seconds, **{"in": back.seconds})
    yield _labelled_counter(
        "transfer_failures", "Failed copies", "direction", out=out.failures, **{"in": back.failures}
    )
    yield _counter("exposed_wait_seconds", "Time the compute stood still for copies", engine.exposed_wait_s)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _labelled_counter(name: str, text: str, label: str, **values: float) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauge(name: str, text: str, label: str, **values: float) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
