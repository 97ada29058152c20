"""Every policy by its name: a new one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable

from ...config import KVCacheConfig, WritePolicy
from ...errors import ConfigError
from ..reuse.history import ReuseHistory
from .adaptive import Adaptive
from .auto import Auto
from .backup import BackupPolicy
from .eviction import EvictionPolicy
from .hyperbolic import Hyperbolic
from .lrfu import Lrfu
from .lru import LeastRecentlyUsed
from .write_back import WriteBack
from .write_through import WriteThrough
from .write_through_selective import WriteThroughSelective

EVICTION_POLICIES: dict[str, Callable[[ReuseHistory], EvictionPolicy]] = {
    "adaptive": Adaptive,
    "lru": lambda history: LeastRecentlyUsed(),
    "hyperbolic": Hyperbolic,
    "lrfu": Lrfu,
}
BACKUP_POLICIES: dict[WritePolicy, Callable[[KVCacheConfig], BackupPolicy]] = {
    WritePolicy.AUTO: Auto,
    WritePolicy.WRITE_THROUGH: WriteThrough,
    WritePolicy.WRITE_THROUGH_SELECTIVE: WriteThroughSelective,
    WritePolicy.WRITE_BACK: WriteBack,
}


def eviction_policy(name: str, tier: str, history: ReuseHistory) -> EvictionPolicy:
    """A new policy for `tier`. Raises `ConfigError` naming the choices."""
    try:
        return EVICTION_POLICIES[name](history)
    except KeyError:
        choices = ", ".join(EVICTION_POLICIES)
        raise ConfigError(f"unknown eviction policy {name!r} of the {tier} tier: choose one of {choices}") from None


def backup_policy(config: KVCacheConfig) -> BackupPolicy:
    """What `config.write_policy` names."""
    return BACKUP_POLICIES[config.write_policy](config)
