"""The storage tier in a worker rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...storage.agent import StorageAgent
from ...storage.attention_store.agent import AttentionStoreAgent
from ...storage.attention_store.sdk import DeviceCaches
from ...storage.backends import open_backend
from ...storage.base import SlotMemory
from ...storage.seal import TRAILER_BYTES
from ...storage.settings import StorageSettings
from ...worker.cache_controller import CacheController
from ..settings import storage_address, storage_settings


class RankStorage(ABC):
    """Moves blocks of one rank to and from the store on its own threads. Only the worker's event loop calls it."""

    host_trailer_bytes = 0
    """Bytes behind each host slot for the store's seal of a block."""
    host_is_shared = False
    """True: other processes map the host tier."""
    uses_device_tier = False
    """True: blocks go from and to the device tier, so the engine must know when passes have ended."""

    @abstractmethod
    def use(self, controller: CacheController) -> None:
        """Call once the tiers have memory."""

    @abstractmethod
    def let_go(self) -> bool:
        """Call before the tiers lose their memory. Returns False if the host tier's memory must stay."""


class HostStorage(RankStorage):
    """Blocks go through the host tier."""

    host_trailer_bytes = TRAILER_BYTES

    def __init__(self, settings: StorageSettings, addresses: tuple[str, str], rank: int) -> None:
        """Starts the threads. `addresses`: of the agent's commands and of its answers."""
        self.host_is_shared = settings.needs_shared_memory
        open_own = partial(open_backend, settings, rank=rank)
        self._agent = StorageAgent(*addresses, rank=rank, open_backend=open_own)

    def use(self, controller: CacheController) -> None:
        pool = controller.host_pool
        memory = SlotMemory(pool.buffer.array.data, pool.slot_bytes, pool.buffer.file)
        self._agent.use(pool.memory_of_slot, memory)

    def let_go(self) -> bool:
        return self._agent.let_go()


class DeviceStorage(RankStorage):
    """Blocks go from and to the device tier. With flush-only, only their names go to the store."""

    def __init__(self, settings: StorageSettings, agent: AttentionStoreAgent) -> None:
        self.uses_device_tier = not settings.flush_only
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

    def let_go(self) -> bool:
        """The agent itself keeps the tensors if it must. It does not use the host tier."""
        self._agent.let_go()
        return True


def rank_storage(
    config: Any, *, device_id: int = 0, on_gpu: bool = False, enter_thread: Callable[[], None] = lambda: None
) -> RankStorage | None:
    """Storage of the rank that an `FDConfig` describes. None without storage, prefix caching, or the tier it needs.

    `enter_thread`: called in each thread that uses the device.
    """
    cache, ranks = config.cache_config, config.parallel_config
    settings = storage_settings(cache)
    if settings is None or not cache.enable_prefix_caching:
        return None
    port, rank = int(ranks.local_engine_worker_queue_port), int(ranks.tensor_parallel_rank)
    addresses = storage_address(port, rank), storage_address(port)
    if not settings.uses_device_tier:
        return HostStorage(settings, addresses, rank) if cache.num_cpu_blocks else None
    agent = AttentionStoreAgent(
        *addresses,
        rank=rank,
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
