"""Which class serves which name of `--kvcache-storage-backend`."""

from __future__ import annotations

from .base import StorageBackend
from .namespace import Namespace
from .settings import StorageSettings

__all__ = ["open_backend"]


def open_backend(settings: StorageSettings, namespace: Namespace) -> StorageBackend:
    """A connection to the store. Raises `ConfigError` when it cannot work, `StorageError` when it does not now."""
    from .file.file_backend import FileBackend

    assert settings.backend == "file"
    assert settings.directory is not None
    return FileBackend(settings.directory, namespace, capacity_bytes=settings.capacity_bytes)
