"""One frozen, validated settings object for the scheduler half, and what commands and servers say about it.

Defaults of these settings stand here only: both servers, `replay` and the benchmarks take them from here. Those of
the embedded server's other flags are in `embedded/settings.py`; FastDeploy's block size is FastDeploy's own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["KVCacheConfig", "WritePolicy"]


class WritePolicy(str, enum.Enum):
    """When a block gets its host copy."""

    AUTO = "auto"
    """When the device tier evicts it, or is about to."""
    WRITE_THROUGH = "write_through"
    """As soon as it is complete."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once it has been hit `write_through_threshold` times."""
    WRITE_BACK = "write_back"
    """When the device tier evicts it."""

    @classmethod
    def choices(cls) -> str:
        return ", ".join(policy.value for policy in cls)

    @classmethod
    def parse(cls, text: str) -> WritePolicy:
        """Raises `ConfigError` naming the choices."""
        try:
            return cls(text)
        except ValueError:
            raise ConfigError(f"unknown write policy {text!r}: choose one of {cls.choices()}") from None


DEFAULT_PORT = 8000
"""Of both servers."""

HELP = {
    "block_size": "tokens per cache block",
    "write_policy": f"when a block gets its host copy: {WritePolicy.choices()}",
    "write_through_threshold": "hits after which write_through_selective copies a block",
}
"""Help texts of flags, by field of `KVCacheConfig`."""


@dataclass(frozen=True)
class KVCacheConfig:
    """Settings of a `CacheManager`. Sizes are in blocks of `block_size` tokens.

    Raises `ConfigError` when constructed with a value that cannot work.
    """

    num_device_blocks: int
    num_host_blocks: int = 0
    block_size: int = 64
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE
    write_through_threshold: int = 2
    enable_prefix_caching: bool = True
    device_eviction: str = "lru"
    """Which block leaves the device first: a name of `scheduler/policies/tables.py`, else `CacheManager` refuses it."""
    host_eviction: str = "lru"
    """Which block leaves the host first, likewise."""
    lookahead_requests: int = 32
    """Waiting requests whose prefixes an eviction spares as long as it can. 0: none."""
    shared_prefill_tokens: int = 256
    """Requests wait one batch for a prefix that it computes for another one, if that saves so many tokens. 0: never."""
    max_queued_events: int = 262_144
    """Blocks that events not taken yet may name; past it, `take_events` describes the whole cache. 0: no events."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "write_policy", WritePolicy.parse(self.write_policy))
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
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be an integer, got {value!r}")
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
