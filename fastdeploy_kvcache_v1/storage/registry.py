"""Registry: the stores that `--kvcache-storage-backend` can name, each in one description.

Ours are in the folders of their stores. An installed package adds one by an entry point of the group `GROUP`, whose
name is that of the store: `s3 = "my_package:STORE"`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, Protocol

from ..config import one_of
from ..contract.flags import Flag
from ..errors import ConfigError
from .base import StorageBackend
from .namespace import Namespace

__all__ = ["GROUP", "OURS", "Chosen", "RoundTrip", "StoreKind", "known_names", "own_flags", "store_flag", "store_kind"]

GROUP = "fastdeploy_kvcache_v1.storage"
OURS = ("file", "mooncake", "attention_store")
"""Folders here, each with a `description.py`, in the order of help texts."""

store_flag = functools.partial(Flag, group="storage", fastdeploy="added")
"""Declares a flag of stores."""


class Chosen(Protocol):
    """What of `StorageSettings` is for a store."""

    @property
    def flush_only(self) -> bool: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class RoundTrip(NamedTuple):
    """Seconds that so many bytes took to a store and back."""

    put_s: float
    get_s: float
    num_bytes: int


@dataclass(frozen=True, eq=False)
class StoreKind:
    """What a server has to know of a store. It is read where no store is used: import the client in the functions."""

    name: str
    _: KW_ONLY
    open: Callable[[Chosen, Namespace], StorageBackend] | None
    """Connects. None for a store that exchanges blocks with the device tier, which has an agent of its own. Raises
    `ConfigError` when it cannot work, `StorageError` when it does not now.
    """
    check: Callable[[Chosen, Namespace | None], object]
    """Before a server takes memory; without a namespace as long as that is not known. Raises as `open`."""
    trial: Callable[[Chosen], RoundTrip] | None = None
    """What `doctor` tries. None: whether values come back through `open`. Raises as `open`."""
    measures: str = ""
    """What `doctor` adds to the rates."""
    flags: Sequence[Flag] = ()
    """Its own, for every command that names stores: made by `store_flag`, of the names `kvcache_NAME_...`, of type str,
    int, float or bool. `Chosen.options` has their values by name. Users must give one that has neither `default` nor
    `otherwise`.
    """
    module: str | None = None
    """The Python module that it needs."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Of the system, with Debian's names of their packages."""
    has_index: bool = False
    """It can be told what a server has without being given the blocks."""
    beside: Callable[[Chosen, int], object] | None = None
    """Starts what must outlive the processes that load and store, once for an engine with so many ranks. Returns at
    once.
    """
    load_threads: int = 4
    """Connections that load side by side. 1: the store itself reads the values of one `get` side by side."""

    def options_of(self, values: Any) -> dict[str, Any]:
        """Its flags are attributes of `values`. Raises `ConfigError` for a wrong value, and for a missing one."""
        options = {}
        for flag in self.flags:
            value = getattr(values, flag.name)
            if value in (None, ""):
                value = os.environ.get(flag.variable) or None
            if value is None and flag.is_required:
                raise ConfigError(f"--kvcache-storage-backend {self.name} needs {flag.option} ({flag.help})")
            options[flag.name] = None if value is None else flag.checked(value)
        return options


def known_names() -> list[str]:
    """No store is imported for it."""
    return [*OURS, *_added()]


@functools.cache
def store_kind(name: str) -> StoreKind:
    """Raises `ConfigError` for an unknown name, and for an added store that cannot be loaded."""
    one_of("--kvcache-storage-backend", known_names(), name)
    if name in OURS:
        ours: StoreKind = importlib.import_module(f".{name}.description", __package__).STORE
        return ours
    try:
        kind = _added()[name].load()
    except Exception as error:  # the edge to a foreign package
        raise ConfigError(f"cannot load the store {name} ({_added()[name].value}): {error!r}") from error
    if not isinstance(kind, StoreKind) or kind.name != name:
        raise ConfigError(f"the entry point {name} of {GROUP} must be a StoreKind of that name, got {kind!r}")
    begin = f"kvcache_{name}_".replace("-", "_")
    for flag in kind.flags:
        if not flag.name.startswith(begin):
            raise ConfigError(f"the store {name} has the flag {flag.option}, expected a name that begins with {begin}")
    return kind


def own_flags() -> dict[str, Sequence[Flag]]:
    """Of each store. One that cannot be loaded has none: `store_kind` says why, to who chooses it."""
    flags = {}
    for name in known_names():
        with suppress(ConfigError):
            flags[name] = store_kind(name).flags
    return flags


@functools.cache
def _added() -> Mapping[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=GROUP) if each.name not in OURS}
