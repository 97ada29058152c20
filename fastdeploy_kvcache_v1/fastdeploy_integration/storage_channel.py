"""How the storage tier's parts inside FastDeploy find each other: settings for the workers, and names of sockets."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..storage.settings import StorageSettings
from .copy_report import socket_path

SETTINGS_VARIABLE = "FD_KVCACHE_V1_STORAGE"
DIRECTORY_VARIABLE = "FILE_BACKEND_STORAGE_DIR"
"""FastDeploy's own, for its file store."""


def storage_settings(cache: Any) -> StorageSettings | None:
    """What a `CacheConfig` asks for: in the engine by its flags, in a worker, which gets none, by the environment.

    None without storage. Raises `ConfigError`.
    """
    if not cache.kvcache_storage_backend:
        return None
    if exported := os.environ.get(SETTINGS_VARIABLE):
        return loads(exported)
    return StorageSettings.of_flags(
        cache.kvcache_storage_backend,
        directory=cache.kvcache_storage_dir or os.environ.get(DIRECTORY_VARIABLE),
        gib=cache.kvcache_storage_gib,
        prefetch=cache.storage_prefetch,
    )


def export(settings: StorageSettings | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the workers started from here on see what the engine was told."""
    environment[SETTINGS_VARIABLE] = "" if settings is None else dumps(settings)


def dumps(settings: StorageSettings) -> str:
    return json.dumps(asdict(settings), default=str)


def loads(text: str) -> StorageSettings:
    fields = json.loads(text)
    directory = fields.pop("directory")
    return StorageSettings(**fields, directory=None if directory is None else Path(directory))


def commands_address(queue_port: int, rank: int) -> str:
    """Where the engine tells rank `rank` what to load and to store."""
    return f"ipc://{socket_path(queue_port, f'storage-{rank}')}"


def results_address(queue_port: int) -> str:
    """Where all ranks answer."""
    return f"ipc://{socket_path(queue_port, 'storage')}"
