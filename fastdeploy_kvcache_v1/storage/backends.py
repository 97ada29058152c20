"""Which class serves which name of `--kvcache-storage-backend`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..scheduler.cache_manager import CacheManager
from .base import StorageBackend
from .engine.link import Link, StorageLink
from .engine.tier import StorageTier
from .namespace import Namespace
from .settings import StorageSettings

__all__ = ["check_backend", "make_link", "make_tier", "open_backend"]


def open_backend(settings: StorageSettings, namespace: Namespace) -> StorageBackend:
    """A connection to a store of values by key. Raises `ConfigError` when it cannot work, `StorageError` when it does
    not now.
    """
    from .file.file_backend import FileBackend

    assert settings.backend == "file"
    assert settings.directory is not None
    return FileBackend(settings.directory, namespace, capacity_bytes=settings.capacity_bytes)


def check_backend(settings: StorageSettings, namespace: Namespace) -> None:
    """Before a server takes memory. Raises as `open_backend`."""
    if settings.backend == "attention_store":
        from .attention_store.sdk import require_installed, require_layout

        require_installed()
        if not settings.flush_only:
            require_layout(namespace.layout)
    else:
        open_backend(settings, namespace).close()


def make_link(settings: StorageSettings, commands_addresses: Sequence[str], results_address: str) -> StorageLink:
    """The engine's end of the agents. Raises `zmq.ZMQError`."""
    if settings.backend == "attention_store":  # its questions go to rank 0, where there is device memory
        from .attention_store.agent import NUM_LANES

        return StorageLink(commands_addresses, results_address, open_backend=None, lanes_per_agent=NUM_LANES)
    return StorageLink(commands_addresses, results_address, open_backend=partial(open_backend, settings))


def make_tier(manager: CacheManager, settings: StorageSettings, namespace: Namespace, link: Link) -> StorageTier:
    """What decides in the engine."""
    if settings.backend == "attention_store":
        from .attention_store.tier import AttentionStoreTier

        return AttentionStoreTier(manager, settings, namespace, link)
    return StorageTier(manager, settings, namespace, link)
