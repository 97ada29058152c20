"""The storage tier's end in a worker rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...metadata import CacheLevel
from ...storage.agent import StorageAgent
from ...storage.backends import open_backend
from ...storage.base import SlotMemory
from ...storage.seal import TRAILER_BYTES
from ...storage.settings import StorageSettings
from ...worker.cache_controller import CacheController
from .. import storage_channel


class RankStorage:
    """Moves host blocks of one rank to and from the store, on threads of its own. The worker's event loop uses it."""

    def __init__(self, settings: StorageSettings, queue_port: int, rank: int) -> None:
        """Starts the threads."""
        self.host_trailer_bytes = TRAILER_BYTES
        self.host_is_shared = settings.needs_shared_memory
        self._agent = StorageAgent(
            storage_channel.commands_address(queue_port, rank),
            storage_channel.results_address(queue_port),
            rank=rank,
            open_backend=partial(open_backend, settings, rank=rank),
        )

    def use(self, controller: CacheController) -> None:
        """The host tier has memory."""
        pool = controller.host_pool
        memory = SlotMemory(pool.buffer.array.data, pool.slot_bytes, pool.buffer.file)
        self._agent.use(pool.memory_of_slot, memory, partial(controller.refilled, level=CacheLevel.HOST))

    def let_go(self) -> bool:
        """The host tier is about to lose its memory. False if it must not, see `StorageAgent.let_go`."""
        return self._agent.let_go()


def rank_storage(config: Any) -> RankStorage | None:
    """Of the rank that an `FDConfig` describes; None without storage or host tier."""
    cache, ranks = config.cache_config, config.parallel_config
    settings = storage_channel.storage_settings(cache)
    if settings is None or not cache.num_cpu_blocks or not cache.enable_prefix_caching:
        return None
    return RankStorage(settings, int(ranks.local_engine_worker_queue_port), int(ranks.tensor_parallel_rank))
