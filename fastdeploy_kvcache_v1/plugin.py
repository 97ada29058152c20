"""Activation inside FastDeploy's processes. `ENABLE_V1_KVCACHE_MANAGER=1` is the one switch.

Two ways lead here: the `.pth` file that installation puts into site-packages, which every process passes before it
imports anything, and FastDeploy's own plugin groups for users of `FD_PLUGINS`. Both may run; the second does nothing.
Until `fastdeploy` is imported nothing happens but one entry on `sys.meta_path`.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from .switch import is_enabled, say_refusals_alone

FASTDEPLOY = "fastdeploy"


class _Trigger:
    """Starts the overlay at the moment `fastdeploy` is looked up, so that its errors reach the importing code."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == FASTDEPLOY and not self._busy:
            self._busy = True  # finding out which FastDeploy it is looks it up again
            try:
                _start()
            finally:
                self._busy = False
            sys.meta_path.remove(self)
        return None


def _start() -> None:
    say_refusals_alone()
    if is_enabled():
        from .fastdeploy_integration.overlay import overlay

        overlay.start()


def activate() -> None:
    """Called from the `.pth` file. Cheap, raises nothing, may be called again."""
    if FASTDEPLOY not in sys.modules:
        _arm()


def _arm() -> None:
    if not any(isinstance(finder, _Trigger) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Trigger())


def stand_by() -> None:
    """Undo `activate`, for a process that only looks at FastDeploy: a release that we refuse must not end it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Trigger)]


def register() -> None:
    """Entry point of FastDeploy's plugin groups. Raises `OverlayError` when FastDeploy cannot be patched.

    FastDeploy calls it in the first import only, so another import after a failure is refused by the trigger.
    """
    try:
        _start()
    except Exception:
        _arm()
        raise
