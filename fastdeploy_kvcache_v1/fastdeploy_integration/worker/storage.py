"""The storage tier in a worker rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...link.rank import RankLink
from ...storage.attention_store.agent import AttentionStoreAgent
from ...storage.attention_store.sdk import DeviceCaches
from ...storage.host_memory import RankMemory
from ...storage.seal import TRAILER_BYTES
from ...storage.settings import StorageSettings
from ...worker.cache_controller import CacheController
from ..settings import storage_settings


class RankStorage(ABC):
    """What the store has of one rank: the memory of a tier. Only the worker's event loop calls it."""

    host_trailer_bytes = 0
    """Bytes behind each host slot for the store's seal of a block. With any, other processes map the host tier."""
    handlers: Mapping[type, Callable[[Any], None]] = {}  # never written
    """Of messages of the engine, for the link to it."""
    uses_device_tier = False
    """True: blocks go from and to the device tier, so the engine must know when passes have ended."""

    @abstractmethod
    def use(self, controller: CacheController) -> None:
        """Call once the tiers have memory."""

    @abstractmethod
    def let_go(self) -> None:
        """Call before the tiers lose their memory."""


class HostStorage(RankStorage):
    """The store process maps the host tier."""

    host_trailer_bytes = TRAILER_BYTES

    def __init__(self, link: RankLink) -> None:
        self._memory = RankMemory(link)
        self.handlers = self._memory.handlers

    def use(self, controller: CacheController) -> None:
        pool = controller.host_pool
        assert pool.buffer.file is not None, "it was made to be shared"
        self._memory.use(pool.buffer.file, pool.num_blocks, pool.slot_bytes)

    def let_go(self) -> None:
        self._memory.let_go()


class DeviceStorage(RankStorage):
    """Blocks go from and to the device tier. With flush-only, only their names go to the store."""

    def __init__(self, settings: StorageSettings, agent: AttentionStoreAgent) -> None:
        self.uses_device_tier = not settings.flush_only
        self.handlers = agent.handlers
        self._agent = agent

    def use(self, controller: CacheController) -> None:
        self._agent.use(
            DeviceCaches.over(
                controller.transfers.device_rows,
                late_writes=controller.transfers.late_writes,
                refilled=controller.transfers.refilled,
                owner=controller.caches,
            )
        )

    def let_go(self) -> None:
        """The agent itself keeps the tensors if it must."""
        self._agent.let_go()


def rank_storage(
    config: Any,
    link: RankLink,
    *,
    device_id: int = 0,
    on_gpu: bool = False,
    enter_thread: Callable[[], None] = lambda: None,
) -> RankStorage | None:
    """Storage of the rank that an `FDConfig` describes. None without storage, prefix caching, or the tier it needs.

    `enter_thread`: called in each thread that uses the device.
    """
    cache, ranks = config.cache_config, config.parallel_config
    settings = storage_settings(cache)
    if settings is None or not cache.enable_prefix_caching:
        return None
    if not settings.uses_device_tier:
        return HostStorage(link) if cache.num_cpu_blocks else None
    agent = AttentionStoreAgent(
        link.send,
        rank=int(ranks.tensor_parallel_rank),
        placement={
            "device_id": device_id,
            "dp_id": int(ranks.local_data_parallel_id),
            "splitwise_role": str(config.scheduler_config.splitwise_role),
            "default_namespace": Path(config.model_config.model).name,
        },
        on_gpu=on_gpu,
        enter_thread=enter_thread,
    )
    return DeviceStorage(settings, agent)
