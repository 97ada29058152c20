"""FastDeploy's own gauges of the cache, and its metrics of one match."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from ...contract.messages import BlockHash, CacheLevel, DeviceSlot, MatchResult
from ...scheduler.cache_manager import CacheManager

WINDOW = 10_000
"""Matches after which FastDeploy counts anew."""


class HitRates:
    """Of a window of matches, as FastDeploy counts them: also those that are rolled back. Not thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_requests = 0
        self.num_hits = 0
        self.num_tokens = 0
        self.num_device_tokens = 0
        self.num_host_tokens = 0
        self.num_stored_tokens = 0
        self._has_news = True

    def count(self, num_tokens: int, *, device: int, host: int, stored: int = 0) -> None:
        """A request of `num_tokens` tokens matched `device` and `host` tokens of the two tiers, and `stored` tokens
        that were loaded.
        """
        if self.num_requests >= WINDOW:
            self.reset()
        self.num_requests += 1
        self.num_hits += device + host + stored > 0
        self.num_tokens += num_tokens
        self.num_device_tokens += device
        self.num_host_tokens += host
        self.num_stored_tokens += stored
        self._has_news = True

    def publish(self, gauges: Any) -> None:
        """Set FastDeploy's gauges where anything was counted: each costs a microsecond or two of the schedule loop."""
        if not self._has_news:
            return
        self._has_news = False
        requests, tokens = max(1, self.num_requests), max(1, self.num_tokens)
        gauges.hit_req_rate.set(self.num_hits / requests)
        num_hit_tokens = self.num_device_tokens + self.num_host_tokens + self.num_stored_tokens
        gauges.hit_token_rate.set(num_hit_tokens / tokens)
        gauges.gpu_hit_token_rate.set(self.num_device_tokens / tokens)
        gauges.cpu_hit_token_rate.set(self.num_host_tokens / tokens)


class PoolGauges:
    """Of the device blocks. `gauges` has FastDeploy's metric objects as attributes. The adapter's lock covers it."""

    def __init__(self, manager: CacheManager, gauges: Any) -> None:
        self._manager = manager
        self._gauges = gauges
        self._published = (-1, 0)
        """Free device blocks and all device blocks, as the gauges show them."""

    def publish_free(self) -> None:
        """Set the gauges if their values changed: each costs a microsecond or two of the schedule loop."""
        free, total = self._manager.num_free_device_blocks, self._manager.num_device_blocks
        if (free, total) != self._published:
            self._published = free, total
            self._gauges.free_gpu_block_num.set(free)
            self._gauges.available_gpu_resource.set(free / total)

    def publish_size(self) -> None:
        self._gauges.max_gpu_block_num.set(self._manager.num_device_blocks)
        self.publish_empty()

    def publish_empty(self) -> None:
        """No request uses a block; FastDeploy itself follows this gauge from here on."""
        self._gauges.available_gpu_block_num.set(self._manager.num_device_blocks)
        self.publish_free()


def match_metrics(
    match: MatchResult,
    table: Sequence[DeviceSlot],
    hashes: Sequence[BlockHash] = (),
    loaded: Callable[[CacheLevel], Container[BlockHash]] | None = None,
) -> dict[str, Any]:
    """FastDeploy changes the dictionary. `table` begins with the slots of the match, `hashes` with its blocks.
    `loaded`: blocks in a tier that the store brought for this request.
    """
    on_device: list[DeviceSlot] = []
    from_host: list[DeviceSlot] = []
    from_store: list[DeviceSlot] = []
    start = 0
    for span in match.spans:
        end = start + span.length
        target = on_device if span.level is CacheLevel.DEVICE else from_host
        if loaded is not None and (stored := loaded(span.level)):
            for slot, block in zip(table[start:end], hashes[start:end], strict=True):
                (from_store if block in stored else target).append(slot)
        else:
            target.extend(table[start:end])
        start = end
    return {
        "gpu_match_token_num": len(on_device) * match.block_size,
        "cpu_match_token_num": len(from_host) * match.block_size,
        "storage_match_token_num": len(from_store) * match.block_size,
        "match_gpu_block_ids": on_device,
        "gpu_recv_block_ids": from_host,
        "match_storage_block_ids": from_store,
        "cpu_cache_prepare_time": 0,
        "storage_cache_prepare_time": 0,
    }
