"""Which class serves which name of `--kvcache-storage-backend`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial

from ..contract.messages import BlockHash
from ..scheduler.cache_manager import CacheManager
from .base import StorageBackend
from .engine.link import Link, StorageLink
from .engine.open_passes import Passes
from .engine.tier import StorageTier
from .namespace import Namespace, commit_key
from .settings import StorageSettings

__all__ = ["check_backend", "check_settings", "make_link", "make_tier", "open_backend"]


def open_backend(settings: StorageSettings, namespace: Namespace, *, rank: int = 0) -> StorageBackend:
    """A connection of one tensor parallel rank to a store of values by key.

    Raises `ConfigError` when it cannot work, `StorageError` when it does not now.
    """
    if settings.backend == "mooncake":
        from .mooncake.mooncake_backend import MooncakeBackend
        from .mooncake.settings import MooncakeSettings

        return MooncakeBackend(MooncakeSettings.read(os.environ), namespace, rank=rank)
    from .file.file_backend import FileBackend

    assert settings.backend == "file"
    assert settings.directory is not None
    return FileBackend(
        settings.directory,
        namespace,
        capacity_bytes=settings.capacity_bytes,
        write_bytes_per_day=settings.write_bytes_per_day,
    )


def check_backend(settings: StorageSettings, namespace: Namespace) -> None:
    """Before a server takes memory. Raises as `open_backend`."""
    if settings.backend == "attention_store":
        from .attention_store.sdk import require_installed, require_layout

        require_installed()
        if not settings.flush_only:
            require_layout(namespace.layout)
    else:
        with contextlib.closing(open_backend(settings, namespace)) as backend:
            backend.count_stored([commit_key(BlockHash(b"a first question"))])  # a store may connect only now


def check_settings(settings: StorageSettings) -> None:
    """As `check_backend`, before there is a namespace, which takes long to find for a large model."""
    if settings.backend == "mooncake":
        from .mooncake.client import MooncakeClient
        from .mooncake.settings import MooncakeSettings

        MooncakeClient(MooncakeSettings.read(os.environ)).close()
    elif settings.backend == "file":
        from .file.directory import check_directory

        assert settings.directory is not None
        check_directory(settings.directory)
    else:
        from .attention_store.sdk import require_installed

        require_installed()


def make_link(settings: StorageSettings, commands_addresses: Sequence[str], results_address: str) -> StorageLink:
    """The engine's end of the agents. Raises `zmq.ZMQError`."""
    if settings.backend == "attention_store":  # its questions go to rank 0, where there is device memory
        from .attention_store.agent import NUM_LANES

        return StorageLink(commands_addresses, results_address, open_backend=None, lanes_per_agent=NUM_LANES)
    return StorageLink(commands_addresses, results_address, open_backend=partial(open_backend, settings))


def make_tier(
    manager: CacheManager,
    settings: StorageSettings,
    namespace: Namespace | None,
    link: Link,
    *,
    passes: Passes | None = None,
) -> StorageTier:
    """What decides in the engine. `passes`: see `StorageTier`."""
    if settings.backend == "attention_store":
        from .attention_store.tier import AttentionStoreTier

        return AttentionStoreTier(manager, settings, namespace, link, passes=passes)
    return StorageTier(manager, settings, namespace, link)
