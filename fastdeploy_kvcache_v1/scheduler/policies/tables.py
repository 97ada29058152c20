"""Every eviction order by its name: a new one is a subclass in a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ConfigError
from ..reuse.history import ReuseHistory
from .adaptive import Adaptive
from .order import EvictionOrder

EVICTION_POLICIES: dict[str, Callable[[ReuseHistory], EvictionOrder]] = {
    "adaptive": Adaptive,
    "lru": lambda history: EvictionOrder(),
}
REMOVED = ("hyperbolic", "lrfu")
"""Eviction policies of earlier versions."""


def known_eviction_policy(name: str) -> str:
    """`name`. Raises `ConfigError` naming the choices."""
    if name in REMOVED:
        raise ConfigError(f"eviction policy {name!r} was removed: use adaptive or lru")
    if name not in EVICTION_POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}: choose one of {', '.join(EVICTION_POLICIES)}")
    return name
