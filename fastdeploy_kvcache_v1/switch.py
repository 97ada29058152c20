"""The switch: with `ENABLE_V1_KVCACHE_MANAGER=1` FastDeploy uses this package, or ends with an error of one line."""

from __future__ import annotations

import os
import sys
from types import TracebackType

SWITCH = "ENABLE_V1_KVCACHE_MANAGER"

SESSION_VARIABLE = "FD_KVCACHE_V1_SESSION"
"""Names the processes of one server: an engine refuses worker ranks that a killed one left behind."""


def name_session() -> None:
    """Name the server that this process starts, unless the process belongs to one."""
    os.environ.setdefault(SESSION_VARIABLE, os.urandom(4).hex())


def is_enabled(*, unset: str = "0") -> bool:
    """Read the switch from the environment. Unset or empty means `unset`. Raises `ConfigError` unless 0 or 1."""
    value = os.environ.get(SWITCH) or unset
    if value not in ("0", "1"):
        from .errors import ConfigError  # not imported in every Python process

        raise ConfigError(f"{SWITCH} must be 0 or 1, got {value!r}")
    return value == "1"


def say_refusals_alone() -> None:
    """Print uncaught refusals as one line on standard error, without traceback."""
    others = sys.excepthook
    if others.__module__ == __name__:
        return

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from .errors import ConfigError, OverlayError

        if isinstance(error, (ConfigError, OverlayError)):
            print(f"fastdeploy-kvcache: error: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            others(kind, error, trace)

    sys.excepthook = say
