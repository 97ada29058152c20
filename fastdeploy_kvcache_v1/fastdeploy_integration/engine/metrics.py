"""Our own metrics, beside those of the host that the adapter keeps feeding."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from .adapter import PrefixCacheAdapter

PREFIX = "fastdeploy:kvcache_v1_"
PUBLISH_EVERY_S = 0.1

GAUGES = {
    "device_free_blocks": "Device blocks that are neither used nor cached",
    "device_cached_blocks": "Device blocks that the prefix tree holds",
    "device_evictable_blocks": "Cached device blocks that no request uses",
    "host_blocks": "Size of the host tier in blocks",
    "host_free_blocks": "Host blocks that hold nothing",
    "host_cached_blocks": "Host blocks that hold a cached block",
}
COUNTERS = {
    "query_tokens": "Tokens of scheduled requests",
    "device_hit_tokens": "Tokens served from the device tier",
    "host_hit_tokens": "Tokens served from the host tier, failed copies left out",
    "resumed_hit_tokens": "Tokens that preempted requests found again when they resumed",
    "swap_in_blocks": "Blocks copied from host to device",
    "swap_out_blocks": "Blocks copied from device to host",
    "device_evicted_blocks": "Blocks that left the device tier",
    "device_lost_blocks": "Blocks that left the device tier without a host copy",
    "host_evicted_blocks": "Blocks that left the host tier",
    "backup_skipped_blocks": "Host copies for which there was no room",
    "duplicate_blocks": "Blocks computed although another request had cached them meanwhile",
    "requests_rolled_back": "Matches that the scheduler took back",
    "requests_preempted": "Preempted requests",
}


@lru_cache(maxsize=1)
def _registered() -> tuple[dict[str, Any], dict[str, Any]]:
    """Once per process. The host collects everything its processes write to the Prometheus directory."""
    from prometheus_client import Counter, Gauge

    gauges = {name: Gauge(PREFIX + name, text, multiprocess_mode="livesum") for name, text in GAUGES.items()}
    return gauges, {name: Counter(PREFIX + name, text) for name, text in COUNTERS.items()}


class CacheMetricsPublisher:
    """Publishes one adapter's numbers, at most ten times a second: a snapshot costs some 20 us in the schedule loop."""

    def __init__(self, adapter: PrefixCacheAdapter) -> None:
        self._adapter = adapter
        self._gauges, self._counters = _registered()
        self._published = dict.fromkeys(COUNTERS, 0)
        self._next = 0.0

    def publish(self) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + PUBLISH_EVERY_S
        stats = self._adapter.manager.stats()
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            value = getattr(stats.counters, name)
            counter.inc(max(0, value - self._published[name]))  # taking back an admission lowers some
            self._published[name] = max(value, self._published[name])
