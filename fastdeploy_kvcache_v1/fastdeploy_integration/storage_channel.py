"""How the storage tier's parts inside FastDeploy find each other: settings for the workers, and names of sockets."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..storage.settings import StorageSettings
from .copy_report import socket_path

SETTINGS_VARIABLE = "FD_KVCACHE_V1_STORAGE"
SESSION_VARIABLE = "FD_KVCACHE_V1_STORAGE_SESSION"
DIRECTORY_VARIABLE = "FILE_BACKEND_STORAGE_DIR"
"""FastDeploy's own, for its file store."""


def storage_settings(cache: Any) -> StorageSettings | None:
    """What a `CacheConfig` asks for: in the engine by its flags, in a worker, which gets none, by the environment.

    None without storage. Raises `ConfigError`.
    """
    if not cache.kvcache_storage_backend:
        return None
    if cache.kvcache_storage_gib is None:  # a worker
        exported = os.environ.get(SETTINGS_VARIABLE)
        if not exported:
            raise ConfigError(f"the engine has not told this worker of its storage: {SETTINGS_VARIABLE} is not set")
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
    if not environment.get(SESSION_VARIABLE):  # data parallel engines have that of the first one
        environment[SESSION_VARIABLE] = secrets.token_hex(4)


def dumps(settings: StorageSettings) -> str:
    return json.dumps(asdict(settings), default=str)


def loads(text: str) -> StorageSettings:
    fields = json.loads(text)
    directory = fields.pop("directory")
    return StorageSettings(**fields, directory=None if directory is None else Path(directory))


def commands_address(queue_port: int, rank: int) -> str:
    """Where the engine tells rank `rank` what to load and to store."""
    return f"ipc://{socket_path(queue_port, f'storage-{_session()}-{rank}')}"


def results_address(queue_port: int) -> str:
    """Where all ranks answer."""
    return f"ipc://{socket_path(queue_port, f'storage-{_session()}')}"


def _session() -> str:
    """Workers that a killed engine has left at the same port have another one: blocks would reach the wrong memory."""
    return os.environ[SESSION_VARIABLE]
