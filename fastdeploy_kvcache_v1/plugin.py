"""Activation inside FastDeploy's processes, by `ENABLE_V1_KVCACHE_MANAGER=1`.

Each Python process runs `activate` from the `.pth` file in site-packages. FastDeploy calls `register` through its
plugin groups, for users of `FD_PLUGINS`. Both may run; the second call does nothing. Until `fastdeploy` is imported,
the only effect is an entry on `sys.meta_path`.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from .switch import is_enabled, name_session, say_refusals_alone

FASTDEPLOY = "fastdeploy"


class _Trigger:
    """Starts the overlay when `fastdeploy` is looked up, so that its errors reach the importing code."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == FASTDEPLOY and not self._busy:
            self._busy = True  # the overlay looks FastDeploy up again, to find its release
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

        name_session()
        overlay.start()


def activate() -> None:
    """Watch for the import of FastDeploy. Called from the `.pth` file. Cheap, idempotent, raises nothing."""
    if FASTDEPLOY not in sys.modules:
        _arm()


def _arm() -> None:
    if not any(isinstance(finder, _Trigger) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Trigger())


def stand_by() -> None:
    """Undo `activate`, for a process that only inspects FastDeploy: a refused release must not end it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Trigger)]


def register() -> None:
    """Start the overlay. Entry point of the plugin groups. Raises `OverlayError` if FastDeploy cannot be patched.

    FastDeploy calls it only at the first import. After a failure the trigger refuses further imports.
    """
    try:
        _start()
    except Exception:
        _arm()
        raise
