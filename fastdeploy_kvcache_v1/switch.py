"""The one switch: with `ENABLE_V1_KVCACHE_MANAGER=1` FastDeploy serves through this package, or ends in one line."""

from __future__ import annotations

import os
import sys
from types import TracebackType

SWITCH = "ENABLE_V1_KVCACHE_MANAGER"


def is_enabled(*, unset: str = "0") -> bool:
    """What the environment says; an unset or empty variable counts as `unset`. Raises `ConfigError` but for 0 and 1."""
    value = os.environ.get(SWITCH) or unset
    if value not in ("0", "1"):
        from .errors import ConfigError  # not in every process that Python starts

        raise ConfigError(f"{SWITCH} must be 0 or 1, got {value!r}")
    return value == "1"


def say_refusals_alone() -> None:
    """From now on, a refusal that nobody catches is one line on standard error: a traceback adds nothing to it."""
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
