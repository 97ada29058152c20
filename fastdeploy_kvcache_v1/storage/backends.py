"""What a server makes of the store that `--kvcache-storage-backend` names, see `registry.py`."""

from __future__ import annotations

from ..link.engine import EngineLink
from ..scheduler.cache_manager import CacheManager
from .engine.link import StorageLink
from .engine.open_passes import Passes
from .engine.store_link import CommandLink, StoreLink
from .engine.tier import StorageTier
from .namespace import Namespace
from .settings import StorageSettings

__all__ = ["check_settings", "device_link", "make_tier"]


def check_settings(settings: StorageSettings, namespace: Namespace | None = None) -> None:
    """Before a server takes memory; without a namespace as long as it is not known, which takes long for a large model.

    Raises `ConfigError` when the store cannot work, `StorageError` when it does not now.
    """
    settings.kind.check(settings, namespace)


def device_link(ranks: EngineLink) -> StorageLink:
    """The engine's end of the agents of a store over the device tier, whose questions go to rank 0."""
    from .attention_store.tasks import ANSWERS

    return StorageLink(ranks, ANSWERS)


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
