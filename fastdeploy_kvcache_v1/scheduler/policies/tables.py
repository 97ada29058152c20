"""Every policy by its name: a new one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable

from ...config import KVCacheConfig, WritePolicy
from ...errors import ConfigError
from ..reuse.history import ReuseHistory
from .adaptive import Adaptive
from .auto import Auto
from .backup import BackupPolicy
from .doubles_first import DoublesFirst
from .eviction import EvictionPolicy
from .lru import LeastRecentlyUsed
from .write_back import WriteBack
from .write_through import WriteThrough
from .write_through_selective import WriteThroughSelective

EVICTION_POLICIES: dict[str, Callable[[ReuseHistory], EvictionPolicy]] = {
    "adaptive": Adaptive,
    "lru": lambda history: LeastRecentlyUsed(),
}
REMOVED = ("hyperbolic", "lrfu")
"""Eviction policies of earlier versions."""

BACKUP_POLICIES: dict[WritePolicy, Callable[[KVCacheConfig], BackupPolicy]] = {
    WritePolicy.AUTO: Auto,
    WritePolicy.WRITE_THROUGH: WriteThrough,
    WritePolicy.WRITE_THROUGH_SELECTIVE: WriteThroughSelective,
    WritePolicy.WRITE_BACK: WriteBack,
}

SHORT_HOST = 2
"""Times as large as the device tier: of a larger host tier what it holds twice is a small part, and each copy that it
saves by giving that up is paid with many.
"""


def known_eviction_policy(name: str) -> str:
    """`name`. Raises `ConfigError` naming the choices."""
    if name in REMOVED:
        raise ConfigError(f"eviction policy {name!r} was removed: use adaptive or lru")
    if name not in EVICTION_POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}: choose one of {', '.join(EVICTION_POLICIES)}")
    return name


def eviction_policy(name: str, history: ReuseHistory) -> EvictionPolicy:
    """A new one. Raises `ConfigError` naming the choices."""
    return EVICTION_POLICIES[known_eviction_policy(name)](history)


def host_policy(
    config: KVCacheConfig, backup: BackupPolicy, history: ReuseHistory, num_device_blocks: Callable[[], int]
) -> EvictionPolicy:
    """The one of the host tier, for that of backups. Raises `ConfigError` naming the choices."""
    order = eviction_policy(config.host_order, history)
    if not backup.saves_at_eviction:
        return order  # a double that is given up would be lost when it leaves the device
    return DoublesFirst(order, lambda: config.num_host_blocks <= SHORT_HOST * num_device_blocks())


def backup_policy(config: KVCacheConfig) -> BackupPolicy:
    """What `config.write_policy` names."""
    return BACKUP_POLICIES[config.write_policy](config)
