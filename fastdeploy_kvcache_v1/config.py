"""KVCacheConfig: the validated settings of the scheduler half. Also the cache directory of a user.

Both servers, `replay`, the benchmarks and the flags (by `contract/flags.py`) take their defaults from here. Only
FastDeploy's block size comes from FastDeploy.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError, ModelFetchError

__all__ = ["KVCacheConfig", "WritePolicy", "cache_directory", "one_of"]


def one_of(name: str, choices: Iterable[str], given: Any) -> Any:
    """Return `given` if it is one of `choices`, else raise `ConfigError` with the user's `name` of the setting."""
    if given not in (known := tuple(choices)):
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {given!r}")
    return given


class WritePolicy(str, enum.Enum):
    """When a block gets its host copy."""

    AUTO = "auto"
    """Just before the device tier evicts it, unless it is worth less than the block it would replace on the host."""
    WRITE_THROUGH = "write_through"
    """As soon as it is complete."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """After `write_through_threshold` hits."""
    WRITE_BACK = "write_back"
    """When the device tier evicts it."""

    @classmethod
    def chosen(cls, policy: str | None, threshold: int | None, *, stores: bool = False) -> WritePolicy:
        """Choose the policy from two flags, each None if not given: a threshold alone means `write_through_selective`.

        `stores`: there is storage, which takes blocks from the host. The default is then `write_through`, so that other
        servers find blocks soon. Raises `ConfigError`.
        """
        if policy:
            return cls(one_of("--write-policy", cls, policy))
        if threshold is not None:
            return cls.WRITE_THROUGH_SELECTIVE
        return cls.WRITE_THROUGH if stores else cls.AUTO


DEFAULT_PORT = 8000

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class KVCacheConfig:
    """Settings of a `CacheManager`. Sizes are in blocks of `block_size` tokens.

    Raises `ConfigError` when constructed with a value that cannot work.
    """

    num_device_blocks: int
    num_host_blocks: int = 0
    block_size: int = 64
    block_bytes: int = 0
    """Bytes of a block on all ranks together, for reports. 0: unknown."""
    write_policy: WritePolicy = WritePolicy.AUTO
    write_through_threshold: int = 2
    enable_prefix_caching: bool = True
    eviction_policy: str = "adaptive"
    """Eviction order of the last tier: the host, or the device if there is no host tier. A device tier above a host
    tier uses LRU. A name of `scheduler/policies/eviction.py`; `CacheManager` refuses any other.
    """
    device_eviction: str = ""
    """Overrides the order of the device tier."""
    host_eviction: str = ""
    """Overrides the order of the host tier."""
    lookahead_requests: int = 32
    """Number of waiting requests whose prefixes are evicted last. 0: none."""
    shared_prefill_tokens: int = 256
    """Requests wait one batch for a prefix computed for another one, if that saves so many tokens. 0: never."""
    max_queued_events: int = 262_144
    """Blocks that untaken events may name. Above it, `take_events` describes the whole cache. 0: no events."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "write_policy", WritePolicy(one_of("write_policy", WritePolicy, self.write_policy)))
        for name, least in (
            ("num_device_blocks", 1),
            ("num_host_blocks", 0),
            ("block_size", 1),
            ("block_bytes", 0),
            ("write_through_threshold", 1),
            ("lookahead_requests", 0),
            ("shared_prefill_tokens", 0),
            ("max_queued_events", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")

    @classmethod
    def of_flags(cls, values: Any, **given: Any) -> KVCacheConfig:
        """Make settings from `given`, and other fields from attributes of `values` that exist and are not None."""
        others = {each.name: getattr(values, each.name, None) for each in fields(cls) if each.name not in given}
        return cls(**{name: value for name, value in others.items() if value is not None}, **given)

    @property
    def device_order(self) -> str:
        """Name of the eviction order of the device tier."""
        return self.device_eviction or ("lru" if self.num_host_blocks else self.eviction_policy)

    @property
    def host_order(self) -> str:
        """Name of the eviction order of the host tier."""
        return self.host_eviction or self.eviction_policy


CACHE_VARIABLE = "FASTDEPLOY_KVCACHE_CACHE"
"""Names the cache directory. The default is `fastdeploy-kvcache` in the user's cache directory."""


def cache_directory() -> Path:
    """Return the absolute path, which may not exist yet. Raises `ModelFetchError` for a user without home directory."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "fastdeploy-kvcache"
    except RuntimeError:
        raise ModelFetchError(
            f"this user has no home directory: set {CACHE_VARIABLE} to a directory for models"
        ) from None
