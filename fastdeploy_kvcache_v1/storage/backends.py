"""What a server makes of the store that `--kvcache-storage-backend` names, see `registry.py`."""

from __future__ import annotations

import contextlib

from ..contract.messages import BlockHash
from ..link.engine import EngineLink
from ..scheduler.cache_manager import CacheManager
from .base import StorageBackend
from .engine.link import StorageLink
from .engine.open_passes import Passes
from .engine.store_link import CommandLink, StoreLink
from .engine.tier import StorageTier
from .namespace import Namespace, commit_key
from .settings import StorageSettings

__all__ = ["check_backend", "check_settings", "make_tier", "open_backend"]


def open_backend(settings: StorageSettings, namespace: Namespace, *, rank: int = 0) -> StorageBackend:
    """A connection of one tensor parallel rank to a store of values by key.

    Raises `ConfigError` when it cannot work, `StorageError` when it does not now.
    """
    connect = settings.kind.open
    assert connect is not None, "a store over the device tier has an agent of its own"
    return connect(settings, namespace, rank)


def check_backend(settings: StorageSettings, namespace: Namespace) -> None:
    """Before a server takes memory. Raises as `open_backend`."""
    if settings.uses_device_tier:
        settings.kind.check(settings, namespace)
    else:
        with contextlib.closing(open_backend(settings, namespace)) as backend:
            backend.count_stored([commit_key(BlockHash(b"a first question"))])  # a store may connect only now


def check_settings(settings: StorageSettings) -> None:
    """As `check_backend`, before there is a namespace, which takes long to find for a large model."""
    settings.kind.check(settings, None)


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
