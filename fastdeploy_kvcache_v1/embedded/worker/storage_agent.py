"""The storage agent of the worker process: which one, and the memory that it moves blocks from and to."""

from __future__ import annotations

from functools import partial

from ...metadata import CacheLevel
from ...storage.agent import StorageAgent
from ...storage.attention_store.agent import AttentionStoreAgent
from ...storage.attention_store.sdk import DeviceCaches
from ...storage.backends import open_backend
from ...storage.base import SlotMemory
from ...storage.lane_agent import LaneAgent
from ...storage.namespace import Namespace
from ...storage.seal import TRAILER_BYTES
from ...storage.settings import StorageSettings
from ...worker.cache_controller import CacheController

__all__ = ["give_memory", "host_trailer_bytes", "make_agent"]


def make_agent(settings: StorageSettings | None, addresses: tuple[str, str], rank: int) -> LaneAgent | None:
    """`addresses` are those of its commands and of its answers; `rank` is its worker's."""
    if settings is None:
        return None
    if settings.uses_device_tier:
        return AttentionStoreAgent(*addresses, rank=rank)
    return StorageAgent(*addresses, rank=rank, open_backend=partial(open_backend, settings, rank=rank))


def host_trailer_bytes(settings: StorageSettings | None) -> int:
    """Behind each host slot, for the checksum of a block that is stored from there."""
    return 0 if settings is None or settings.uses_device_tier else TRAILER_BYTES


def give_memory(agent: LaneAgent, controller: CacheController, namespace: Namespace | None) -> None:
    """The tiers have memory. Raises `ConfigError` or `StorageError` when the store cannot be used."""
    if isinstance(agent, AttentionStoreAgent):
        assert namespace is not None, "where there is storage there is a namespace"
        agent.use(
            DeviceCaches.over(controller.device_rows, late_writes=controller.late_writes, refilled=controller.refilled)
        )
        agent.connect(namespace)
    else:
        assert isinstance(agent, StorageAgent)
        pool = controller.host_pool
        memory = SlotMemory(pool.buffer.array.data, pool.slot_bytes, pool.buffer.file)
        agent.use(pool.memory_of_slot, memory, partial(controller.refilled, level=CacheLevel.HOST))
