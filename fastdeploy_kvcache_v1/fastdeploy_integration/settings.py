"""Flags that this package adds to FastDeploy, and the environment by which the engine passes them to its workers."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import KVCacheConfig, WritePolicy
from ..contract.flags import CACHE_FLAGS, SWAP_SPACE, WRITE_POLICY
from ..errors import ConfigError
from ..scheduler.policies.eviction import EVICTION_POLICY
from ..storage.settings import STORAGE_FLAGS, StorageSettings, flags_of_others

ADDED_FLAGS = tuple(flag for flag in (*CACHE_FLAGS, EVICTION_POLICY, *STORAGE_FLAGS) if flag.fastdeploy == "added")
"""Fields that FastDeploy's `EngineArgs` and `CacheConfig` lack."""

BLOCK_BYTES_VARIABLE = "FD_KVCACHE_V1_HOST_BLOCK_BYTES"
STORAGE_VARIABLE = "FD_KVCACHE_V1_STORAGE"

RUN_DIRECTORY = "FASTDEPLOY_KVCACHE_CPU_RUN"
"""Variable with the private directory of a CPU server, in each of its processes."""

LOG_DIRECTORY = "FD_LOG_DIR"
"""FastDeploy's variable."""


def log_directory() -> Path:
    return Path(os.environ.get(LOG_DIRECTORY, "log"))


def host_block_bytes() -> int | None:
    """Bytes of a host block by which the engine sized the host tier; None if it did not."""
    return int(os.environ.get(BLOCK_BYTES_VARIABLE) or 0) or None


def storage_settings(cache: Any) -> StorageSettings | None:
    """By flags in the engine, by the environment in a worker. None without storage. Raises `ConfigError`."""
    if not cache.kvcache_storage_backend:
        return None
    if cache.storage_prefetch is None:  # a worker
        if not (exported := os.environ.get(STORAGE_VARIABLE)):
            raise ConfigError(f"got no {STORAGE_VARIABLE}, expected the engine's storage settings in it: report this")
        return StorageSettings(**json.loads(exported))
    return StorageSettings.of_flags(cache)


def export(
    block_bytes: int | None, storage: StorageSettings | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Pass the settings to workers that are started from now on."""
    environment[BLOCK_BYTES_VARIABLE] = "" if block_bytes is None else str(block_bytes)
    environment[STORAGE_VARIABLE] = "" if storage is None else json.dumps(asdict(storage), default=str)


def without_effect(cache: Any) -> list[str]:
    """A line for each flag of a `CacheConfig` that was given and has no effect, with the reason."""
    values = {flag: getattr(cache, flag.name) for flag in (SWAP_SPACE, *ADDED_FLAGS)}
    given = {flag.name: f"{flag.option} {value}" for flag, value in values.items() if value not in (None, flag.default)}
    is_default = cache.write_through_threshold == KVCacheConfig.write_through_threshold
    threshold = None if is_default else given.get("write_through_threshold")
    policy = f"{WRITE_POLICY.option} {cache.write_policy}"
    both = f"{threshold} or {policy}" if threshold else policy
    counts_hits = cache.write_policy == WritePolicy.WRITE_THROUGH_SELECTIVE
    no_host = cache.write_policy != WritePolicy.AUTO and not cache.num_cpu_blocks
    no_caching, store = not cache.enable_prefix_caching, cache.kvcache_storage_backend
    checks = (
        (given.get("swap_space"), no_caching and cache.swap_space, "prefix caching is off"),
        (given.get("eviction_policy"), no_caching, "prefix caching is off"),
        (threshold, not counts_hits, f"{policy} does not count hits; write_through_selective does"),
        (both, no_host, "there is no host tier (--swap-space)"),
        (given.get("storage_prefetch"), not store, "there is no store (--kvcache-storage-backend)"),
        *((given[flag.name], True, f"only the {name} store has it") for flag, name in flags_of_others(cache)),
    )
    return [f"{flag} has no effect: {reason}" for flag, applies, reason in checks if flag and applies]
