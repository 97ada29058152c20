"""Attention families by name. A new family is a file with its `AttentionCacheBackend`, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature

from ..errors import ConfigError
from .base import AttentionCacheBackend
from .dsa import DSACacheBackend
from .geometry import CacheGeometry
from .gqa import GQACacheBackend
from .mla import MLACacheBackend

FAMILIES: dict[str, Callable[..., AttentionCacheBackend]] = {
    "gqa": GQACacheBackend,
    "mla": MLACacheBackend,
    "dsa": DSACacheBackend,
}
"""A constructor's parameters are fields of `CacheGeometry`; the family needs those that have no default."""

OF_EVERY_FAMILY = ("num_layers", "block_size", "dtype")


def make_cache_backend(family: str, geometry: CacheGeometry) -> AttentionCacheBackend:
    """The backend of `family` for these numbers. Takes no memory.

    Its `layout` says shapes, order and bytes: a host slot holds `layout.block_bytes`, and a swap moves that per block.
    Raises `ConfigError` for a family that is unknown, numbers that it needs and the geometry lacks, and numbers that
    its layout refuses.
    """
    needed = needed_numbers(family)
    if missing := [name for name in needed if getattr(geometry, name) is None]:
        raise ConfigError(
            f"attention family {family} needs {', '.join(missing)}, which the model's configuration lacks"
        )
    return FAMILIES[family](**{name: getattr(geometry, name) for name in _parameters(family)})


def needed_numbers(family: str) -> tuple[str, ...]:
    """Fields of `CacheGeometry` that `family` needs beside those of every family, in its constructor's order.

    Raises `ConfigError` for a family that is unknown.
    """
    required = (name for name, each in _parameters(family).items() if each.default is Parameter.empty)
    return tuple(name for name in required if name not in OF_EVERY_FAMILY)


def _parameters(family: str) -> dict[str, Parameter]:
    if family not in FAMILIES:
        raise ConfigError(f"unknown attention family {family!r}: choose one of {', '.join(FAMILIES)}")
    return dict(signature(FAMILIES[family]).parameters)
