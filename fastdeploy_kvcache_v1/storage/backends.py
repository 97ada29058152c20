"""What a server makes of the store that `--kvcache-storage-backend` names, see `registry.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..link.engine import EngineLink
from ..scheduler.cache_manager import CacheManager
from .engine.link import StorageLink
from .engine.open_passes import Passes
from .engine.store_link import CommandLink, StoreLink
from .engine.tier import StorageTier
from .host_memory import memory_handlers
from .namespace import Namespace
from .parts import Parts
from .process import StoreProcess
from .settings import StorageSettings

__all__ = ["OpenStore", "check_settings", "make_tier", "open_store"]


def check_settings(settings: StorageSettings, namespace: Namespace | None = None) -> None:
    """Before a server takes memory; without a namespace as long as it is not known, which takes long for a large model.

    Raises `ConfigError` when the store cannot work, `StorageError` when it does not now.
    """
    settings.kind.check(settings, namespace)


class OpenStore(NamedTuple):
    link: StorageLink | StoreProcess
    """For the tier."""
    handlers: Mapping[type, Callable[[int, Any], None]]
    """Of what ranks say about storage, for `EngineLink.listen`."""
    rank_gone: Callable[[int], None]
    """For `EngineLink.listen`, too."""


def open_store(settings: StorageSettings, ranks: EngineLink, num_kv_heads: Callable[[], int | None]) -> OpenStore:
    """Call before `ranks` listen. `num_kv_heads`: of the whole model; None for a latent cache, whole on each rank.
    It is asked for a store over the host tier alone.
    """
    if settings.uses_device_tier:
        return _agents_of(ranks)
    store = StoreProcess(settings, Parts.of(ranks.num_ranks, num_kv_heads()))
    return OpenStore(store, memory_handlers(ranks, store), store.drop_memory)


def _agents_of(ranks: EngineLink) -> OpenStore:
    """The agents in the ranks, of a store over the device tier. A rank that has ended does not answer."""
    from .attention_store.tasks import ANSWERS

    agents = StorageLink(ranks, ANSWERS)
    return OpenStore(agents, agents.handlers, lambda rank: None)


def make_tier(
    manager: CacheManager,
    settings: StorageSettings,
    namespace: Namespace | None,
    link: StoreLink | CommandLink,
    *,
    passes: Passes | None = None,
) -> StorageTier:
    """What decides in the engine. `passes`: see `StorageTier`."""
    if settings.uses_device_tier:
        from .attention_store.tier import AttentionStoreTier

        return AttentionStoreTier(manager, settings, namespace, link, passes=passes)
    return StorageTier(manager, settings, namespace, link)
