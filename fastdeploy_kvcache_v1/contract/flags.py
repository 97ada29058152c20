"""Flag: declares a flag once for command lines, FastDeploy's arguments, help, files and docs. And the cache's flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..config import KVCacheConfig, WritePolicy, one_of
from ..errors import ConfigError

EXPECTED: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}
FITS: dict[type, tuple[type, ...]] = {float: (int, float), Path: (str, Path)}


@dataclass(frozen=True, eq=False)
class Flag:
    name: str
    """As an attribute: `swap_space` for `--swap-space`."""
    help: str
    type: type = str
    default: Any = None
    _: KW_ONLY
    group: str
    """Title in help and docs."""
    otherwise: str = ""
    """Text of the default in help, where `default` does not say it."""
    unit: str | None = None
    """Placeholder of the value in help."""
    choices: Iterable[str] = ()
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    fastdeploy: Literal["yes", "added", "no"] = "no"
    """Does FastDeploy's api_server have this flag? `added`: by this package."""
    variable: str = ""
    """Of the environment: it stands in for a store's flag that is not given."""

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        """By a store that has this flag: nothing else says what follows without it."""
        return self.default is None and not self.otherwise

    @property
    def full_help(self) -> str:
        text = f"{self.help}: {', '.join(self.choices)}" if self.choices else self.help
        if self.otherwise or self.default is None:
            return f"{text} (default: {self.otherwise})" if self.otherwise else text
        return f"{text} (default: {format(self.default, 'g' if self.type is float else '')})"

    def checked(self, value: object, name: str | None = None) -> Any:
        """Convert `value` to the flag's type. Raises `ConfigError`, which names `name` (default: the option)."""
        name = name or self.option
        if self.choices:
            one_of(name, self.choices, value)
        fits = isinstance(value, FITS.get(self.type, self.type)) and isinstance(value, bool) == (self.type is bool)
        if isinstance(value, (int, float)):
            fits = fits and self.above < value < math.inf and self.least <= value <= self.most
        if not fits:
            raise ConfigError(f"{name} must be {EXPECTED.get(self.type, 'text')}{self._bounds()}, got {value!r}")
        return self.type(value)

    def _bounds(self) -> str:
        if self.most < math.inf:
            return f" from {self.least} to {self.most}"
        if self.above > -math.inf:
            return f" above {self.above:g}"
        return f" of at least {self.least}" if self.least > -math.inf else ""


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag], *, with_defaults: bool = False) -> None:
    """Add `flags` to `parser`, by group. Without `with_defaults`, a flag that is not given is None."""
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(flag.group for flag in flags)}
    for flag in flags:
        options: dict[str, Any] = {"type": flag.type, "metavar": flag.unit}
        if flag.type is bool:
            options = {"action": argparse.BooleanOptionalAction if flag.default else "store_true"}
        options["default"] = flag.default if with_defaults else None
        groups[flag.group].add_argument(flag.option, help=flag.full_help, **options)


_cache = partial(Flag, group="cache", fastdeploy="yes")

BLOCK_SIZE = _cache("block_size", "tokens per cache block", int, KVCacheConfig.block_size, unit="TOKENS", least=1)
SWAP_SPACE = _cache(
    "swap_space",
    "host memory of the cache in GiB, all tensor-parallel ranks together; 0: none",
    float,
    otherwise="1, or less where memory is short; FastDeploy: none",
    unit="GIB",
    least=0,
)
WRITE_POLICY = _cache(
    "write_policy",
    "when a block gets its host copy",
    otherwise="auto; with storage: write_through; with --write-through-threshold: write_through_selective",
    unit="POLICY",
    choices=WritePolicy,
)
WRITE_THROUGH_THRESHOLD = _cache(
    "write_through_threshold",
    "hits after which write_through_selective copies a block",
    int,
    otherwise=str(KVCacheConfig.write_through_threshold),
    unit="HITS",
    least=1,
    fastdeploy="added",
)
CACHE_FLAGS = (
    BLOCK_SIZE,
    _cache("num_gpu_blocks_override", "blocks of the device tier", int, otherwise="by memory", unit="N", least=1),
    SWAP_SPACE,
    _cache("enable_prefix_caching", "share the KV of common prefixes", bool, KVCacheConfig.enable_prefix_caching),
    WRITE_POLICY,
    WRITE_THROUGH_THRESHOLD,
)
