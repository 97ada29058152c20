"""The one switch: with `ENABLE_V1_KVCACHE_MANAGER=1` FastDeploy serves through this package."""

from __future__ import annotations

import os

SWITCH = "ENABLE_V1_KVCACHE_MANAGER"


def is_enabled(*, unset: str = "0") -> bool:
    """What the environment says; an unset or empty variable counts as `unset`. Raises `ConfigError` but for 0 and 1."""
    value = os.environ.get(SWITCH) or unset
    if value not in ("0", "1"):
        from .errors import ConfigError  # not in every process that Python starts

        raise ConfigError(f"{SWITCH} must be 0 or 1, got {value!r}")
    return value == "1"
