"""One frozen, validated settings object for the scheduler half, and where a user's files stay.

Defaults of these settings stand here only: both servers, `replay` and the benchmarks take them from here, the flags
among them by `contract/flags.py`. FastDeploy's block size is FastDeploy's own.
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
    """`given`. Raises `ConfigError` for what is none of the `choices`; `name` is what the user calls the setting."""
    if given not in (known := tuple(choices)):
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {given!r}")
    return given


class WritePolicy(str, enum.Enum):
    """When a block gets its host copy."""

    AUTO = "auto"
    """When the device tier evicts it, or is about to, unless what it would replace on the host is worth more."""
    WRITE_THROUGH = "write_through"
    """As soon as it is complete."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once it has been hit `write_through_threshold` times."""
    WRITE_BACK = "write_back"
    """When the device tier evicts it."""

    @classmethod
    def chosen(cls, policy: str | None, threshold: int | None, *, stores: bool = False) -> WritePolicy:
        """What a user who gave these flags, or None, wants: a threshold alone means `write_through_selective`.

        `stores`: storage takes what reaches the host. For others to find a block soon, it must get there at once.
        Raises `ConfigError`.
        """
        if policy:
            return cls(one_of("--write-policy", cls, policy))
        if threshold is not None:
            return cls.WRITE_THROUGH_SELECTIVE
        return cls.WRITE_THROUGH if stores else cls.AUTO


DEFAULT_PORT = 8000
"""Of both servers."""

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
    write_policy: WritePolicy = WritePolicy.AUTO
    write_through_threshold: int = 2
    enable_prefix_caching: bool = True
    eviction_policy: str = "adaptive"
    """Which block is lost first: a name of `scheduler/policies/eviction.py`, else `CacheManager` refuses it. It is the
    order of the host tier, or of the device tier where there is no other: above the last tier the order is LRU.
    """
    device_eviction: str = ""
    """The order of the device tier, if it is to be another one, see `device_order`."""
    host_eviction: str = ""
    """The order of the host tier, likewise."""
    lookahead_requests: int = 32
    """Waiting requests whose prefixes an eviction spares as long as it can. 0: none."""
    shared_prefill_tokens: int = 256
    """Requests wait one batch for a prefix that it computes for another one, if that saves so many tokens. 0: never."""
    max_queued_events: int = 262_144
    """Blocks that events not taken yet may name; past it, `take_events` describes the whole cache. 0: no events."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "write_policy", WritePolicy(one_of("write_policy", WritePolicy, self.write_policy)))
        for name, least in (
            ("num_device_blocks", 1),
            ("num_host_blocks", 0),
            ("block_size", 1),
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
        """The fields `given`, and others whose names `values` has as attributes, unless they are None there."""
        others = {each.name: getattr(values, each.name, None) for each in fields(cls) if each.name not in given}
        return cls(**{name: value for name, value in others.items() if value is not None}, **given)

    @property
    def device_order(self) -> str:
        """Name of the policy by which blocks leave the device."""
        return self.device_eviction or ("lru" if self.num_host_blocks else self.eviction_policy)

    @property
    def host_order(self) -> str:
        """Name of the policy by which blocks leave the host."""
        return self.host_eviction or self.eviction_policy


CACHE_VARIABLE = "FASTDEPLOY_KVCACHE_CACHE"
"""Names the cache directory; without it, `fastdeploy-kvcache` in the user's own."""


def cache_directory() -> Path:
    """Absolute; need not exist yet. Raises `ModelFetchError` for a user without home directory."""
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
