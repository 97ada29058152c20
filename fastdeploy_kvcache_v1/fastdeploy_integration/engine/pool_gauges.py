"""PoolGauges: FastDeploy's gauges of the device blocks."""

from __future__ import annotations

from typing import Any

from ...scheduler.cache_manager import CacheManager


class PoolGauges:
    """`gauges` has FastDeploy's metric objects as attributes. Not thread-safe: the adapter's lock covers it."""

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
