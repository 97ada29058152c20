"""Which class serves which name of `--kvcache-storage-backend`."""

from __future__ import annotations

import os

from .base import StorageBackend
from .namespace import Namespace
from .settings import StorageSettings

__all__ = ["open_backend"]


def open_backend(settings: StorageSettings, namespace: Namespace, *, rank: int = 0) -> StorageBackend:
    """A connection to the store, of one tensor parallel rank.

    Raises `ConfigError` when it cannot work, `StorageError` when it does not now.
    """
    if settings.backend == "mooncake":
        from .mooncake.mooncake_backend import MooncakeBackend
        from .mooncake.settings import MooncakeSettings

        return MooncakeBackend(MooncakeSettings.read(os.environ), namespace, rank=rank)
    from .file.file_backend import FileBackend

    assert settings.backend == "file"
    assert settings.directory is not None
    return FileBackend(settings.directory, namespace, capacity_bytes=settings.capacity_bytes)
