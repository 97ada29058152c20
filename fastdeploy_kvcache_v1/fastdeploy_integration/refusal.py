"""How a process inside FastDeploy ends that we refuse to serve in."""

from __future__ import annotations

import sys
from types import TracebackType

from ..errors import ConfigError, OverlayError


def say_refusals_alone() -> None:
    """From now on, a refusal that nobody catches is one line on standard error: a traceback adds nothing to it."""
    others = sys.excepthook
    if others.__module__ == __name__:
        return

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (ConfigError, OverlayError)):
            print(f"fastdeploy-kvcache: error: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            others(kind, error, trace)

    sys.excepthook = say
