"""The storage tier's end in a worker rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...storage.agent import StorageAgent
from ...storage.backends import open_backend
from .. import storage_channel


def storage_agent(config: Any) -> StorageAgent | None:
    """Of the rank that an `FDConfig` describes; None without storage or host tier. Starts its threads."""
    cache, ranks = config.cache_config, config.parallel_config
    settings = storage_channel.storage_settings(cache)
    if settings is None or not cache.num_cpu_blocks or not cache.enable_prefix_caching:
        return None
    port, rank = int(ranks.local_engine_worker_queue_port), int(ranks.tensor_parallel_rank)
    return StorageAgent(
        storage_channel.commands_address(port, rank),
        storage_channel.results_address(port),
        rank=rank,
        open_backend=partial(open_backend, settings),
    )
