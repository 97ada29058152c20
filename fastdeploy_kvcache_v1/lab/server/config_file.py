"""Flags of `serve` as YAML: `--config FILE` reads what `--print-config` prints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigError
from .settings import FLAGS


def fill(args: argparse.Namespace) -> dict[str, Any]:
    """Fill `args` with the flags of the file `args.config` that the command line lacks. Returns unknown flags, which
    need `--fastdeploy-cpu`. Raises `ConfigError` that names file and key.
    """
    path: Path | None = args.config
    try:
        content = {} if path is None else yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path} must have lines such as `port: 8000`, got {content!r}")
    known = {flag.name: flag for flag in FLAGS}
    values = {key.replace("-", "_"): value for key, value in content.items()}
    for name in [name for name in known if name in values]:
        value = known[name].checked(values.pop(name), f"{name} in {path}")
        if getattr(args, name) is None:
            setattr(args, name, value)
    if values and not args.fastdeploy_cpu:
        name = next(iter(values))
        near = get_close_matches(name, known, 1)
        raise ConfigError(f"unknown flag {name} in {path}" + (f": did you mean {near[0]}?" if near else ""))
    return values


def text(values: Mapping[str, Any]) -> str:
    """A file with these flags, without those that are None."""
    given = {name: value for name, value in values.items() if value is not None}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return yaml.safe_dump(plain, sort_keys=False)
