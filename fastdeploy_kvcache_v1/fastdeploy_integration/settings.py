"""What the command line says about the cache, and how it reaches the workers: they take no flags of ours."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from ..config import KVCacheConfig, WritePolicy
from ..errors import ConfigError
from ..storage.settings import StorageSettings
from ..units import GIB

POLICY_VARIABLE = "FD_KVCACHE_V1_WRITE_POLICY"
THRESHOLD_VARIABLE = "FD_KVCACHE_V1_WRITE_THROUGH_THRESHOLD"
BLOCK_BYTES_VARIABLE = "FD_KVCACHE_V1_HOST_BLOCK_BYTES"

RUN_DIRECTORY = "FASTDEPLOY_KVCACHE_CPU_RUN"
"""Names the private directory of a server that computes on the CPU, in each of its processes."""

LOG_DIRECTORY = "FD_LOG_DIR"
"""FastDeploy's own."""


def log_directory() -> Path:
    return Path(os.environ.get(LOG_DIRECTORY, "log"))


def write_policy(given: str | None, threshold: int | None, *, stores: bool) -> WritePolicy:
    """The policy `given`, else that of the environment, else what follows from the rest, see `WritePolicy.chosen`.
    Raises `ConfigError`.
    """
    return WritePolicy.chosen(given or os.environ.get(POLICY_VARIABLE), threshold, stores=stores)


def write_through_threshold(given: int | None) -> int:
    """The threshold `given`, else that of the environment, else the default. Raises `ConfigError`."""
    text = str(os.environ.get(THRESHOLD_VARIABLE, KVCacheConfig.write_through_threshold) if given is None else given)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--write-through-threshold must be a whole number of at least 1, got {text}")
    return int(text)


def host_block_bytes() -> int | None:
    """Bytes of a host block by which the engine sized the tier; None when it did not."""
    text = os.environ.get(BLOCK_BYTES_VARIABLE)
    return int(text) if text else None


def export(
    policy: WritePolicy,
    threshold: int,
    block_bytes: int | None = None,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Let the processes started from here on see what the engine was told, and what it expects."""
    environment[POLICY_VARIABLE] = policy.value
    environment[THRESHOLD_VARIABLE] = str(threshold)
    environment[BLOCK_BYTES_VARIABLE] = "" if block_bytes is None else str(block_bytes)


def without_effect(cache: Any) -> list[str]:
    """Flags of a `CacheConfig` that change nothing beside its others, each with the reason. A flag at its default is
    not among them.
    """

    def is_given(name: str, default: object) -> bool:
        return getattr(cache, name) not in (None, default)

    is_off, no_file = not cache.enable_prefix_caching, cache.kvcache_storage_backend != "file"
    has_threshold = is_given("write_through_threshold", KVCacheConfig.write_through_threshold)
    threshold = f"--write-through-threshold {cache.write_through_threshold}"
    policy = f"--write-policy {cache.write_policy}"
    checks = {
        "--swap-space": ("prefix caching is off", is_off and cache.swap_space),
        f"--eviction-policy {cache.eviction_policy}": (
            "prefix caching is off",
            is_off and is_given("eviction_policy", KVCacheConfig.eviction_policy),
        ),
        threshold: (
            f"{policy} does not count hits, write_through_selective does",
            has_threshold and cache.write_policy != WritePolicy.WRITE_THROUGH_SELECTIVE,
        ),
        f"{threshold} or {policy}" if has_threshold else policy: (
            "there is no host tier (--swap-space)",
            cache.write_policy != WritePolicy.AUTO and not cache.num_cpu_blocks,
        ),
        "--kvcache-storage-dir": ("only the file store has one", no_file and is_given("kvcache_storage_dir", None)),
        f"--kvcache-storage-gib {cache.kvcache_storage_gib}": (
            "only the file store has a limit",
            no_file and is_given("kvcache_storage_gib", StorageSettings.capacity_bytes / GIB),
        ),
        f"--storage-prefetch {cache.storage_prefetch}": (
            "there is no store (--kvcache-storage-backend)",
            not cache.kvcache_storage_backend and is_given("storage_prefetch", StorageSettings.prefetch.value),
        ),
    }
    return [f"{flag} has no effect: {reason}" for flag, (reason, applies) in checks.items() if applies]
