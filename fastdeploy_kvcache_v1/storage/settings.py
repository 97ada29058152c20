"""What users choose about the storage tier."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import one_of
from ..contract.flags import Flag
from ..errors import ConfigError
from .registry import StoreKind, known_names, own_flags, store_flag, store_kind

__all__ = ["STORAGE_FLAGS", "Prefetch", "StorageSettings", "flags_of_others"]


class Prefetch(str, enum.Enum):
    """How long a request waits for its stored prefix. What has not arrived by then is computed."""

    BEST_EFFORT = "best_effort"
    """Not at all: it starts when there is room for it."""
    TIMEOUT = "timeout"
    """While that is sooner than computing it: at most as long as computing takes, or for
    `StorageSettings.timeout_base_s` and `timeout_per_1k_tokens_s` of the prefix if that is longer.
    """
    WAIT_COMPLETE = "wait_complete"
    """Until all of it is there, or the store stands still, even if computing it is sooner."""


def takes_host_blocks(backend: str | None) -> bool:
    """Does the store of that name, if any, take and fill blocks of the host tier? If not, of the device tier."""
    return backend is not None and store_kind(backend).open is not None


@dataclass(frozen=True)
class StorageSettings:
    """Raises `ConfigError` when constructed with a value that cannot work."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of the store's own flags, see `StoreKind.flags`."""
    flush_only: bool = False
    """Of the `attention_store`: no block is loaded or stored, only its index is told what this server has."""
    prefetch: Prefetch = Prefetch.TIMEOUT
    min_tokens: int = 256
    """A shorter stored prefix is computed instead: asking and waiting cost more."""
    timeout_base_s: float = 0.5
    timeout_per_1k_tokens_s: float = 0.5
    stall_s: float = 10.0
    """A store that brings nothing for so long stands still."""

    @classmethod
    def of_flags(cls, values: Any) -> StorageSettings:
        """`values` has `STORAGE_FLAGS` as attributes, and a backend among them. FastDeploy's variables count, too.
        Raises `ConfigError`.
        """
        kind = store_kind(values.kvcache_storage_backend)
        return cls(
            kind.name,
            kind.options_of(values),
            flush_only=kind.has_index and _is_set("FD_AS_ONLY_FLUSH"),
            prefetch=values.storage_prefetch,
        )

    @property
    def kind(self) -> StoreKind:
        return store_kind(self.backend)

    @property
    def uses_device_tier(self) -> bool:
        """Blocks go from and to the device tier. If not, they go through the host tier."""
        return self.kind.open is None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefetch", Prefetch(one_of("--storage-prefetch", Prefetch, self.prefetch)))
        if not self.kind.has_index and self.flush_only:
            raise ConfigError(f"the storage backend {self.backend} has no index to flush: choose one that has")
        for name in ("timeout_base_s", "timeout_per_1k_tokens_s", "stall_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(f"{name} must be a number of seconds from 0 on, got {getattr(self, name)}")
        if self.min_tokens < 1:
            raise ConfigError(f"min_tokens must be at least 1, got {self.min_tokens}")


def flags_of_others(values: Any) -> Iterator[tuple[Flag, str]]:
    """Flags that `values` give to stores which its `kvcache_storage_backend` does not name, with the store's name.
    A default is not given.
    """
    for name, flags in own_flags().items():
        for flag in flags:
            if name != values.kvcache_storage_backend and getattr(values, flag.name) not in (None, flag.default):
                yield flag, name


def _is_set(variable: str) -> bool:
    """FastDeploy's switches are 0 or 1."""
    text = os.environ.get(variable, "0")
    one_of(f"the environment variable {variable}", ("0", "1"), text)
    return text == "1"


STORAGE_FLAGS = (
    store_flag(
        "kvcache_storage_backend",
        "store for blocks, shared with other servers and kept over restarts",
        otherwise="none",
        unit="NAME",
        choices=known_names(),
        fastdeploy="yes",
    ),
    *(flag for flags in own_flags().values() for flag in flags),
    store_flag(
        "storage_prefetch",
        "how long a request waits for a stored prefix",
        default=StorageSettings.prefetch.value,
        unit="POLICY",
        choices=Prefetch,
    ),
)
