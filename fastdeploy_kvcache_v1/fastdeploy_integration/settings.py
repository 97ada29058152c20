"""What the command line says about the cache, and how it reaches the workers: they take no flags of ours."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from ..config import KVCacheConfig, WritePolicy
from ..errors import ConfigError

POLICY_VARIABLE = "FD_KVCACHE_V1_WRITE_POLICY"
THRESHOLD_VARIABLE = "FD_KVCACHE_V1_WRITE_THROUGH_THRESHOLD"
BLOCK_BYTES_VARIABLE = "FD_KVCACHE_V1_HOST_BLOCK_BYTES"


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
