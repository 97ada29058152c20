"""Overlay: applies a patch table to FastDeploy as its modules are imported, all of it or none.

The whole table is checked against FastDeploy's source before anything is patched; each target is looked at again when
its module has been imported. A module that is still being imported when we arrive is patched later: its classes may not
exist yet. `require_complete` is what makes a half-applied overlay unable to serve.
"""

from __future__ import annotations

import enum
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from ...errors import OverlayError
from ...forks import guard, renewed_in_children
from ...switch import SWITCH
from ...telemetry.metrics import gauge, source
from .bodies import Change, acceptance, changes, known_digests
from .release import OWN_MANAGER, FastDeployTree, installed_fastdeploy
from .source import check_row, expected_parameters, lost_settings, runtime_parameters
from .table import Kind, PatchRow, PatchTable, Where, table_for

logger = logging.getLogger(__name__)

UNKNOWN_BODIES = "FASTDEPLOY_KVCACHE_UNKNOWN_BODIES"
"""Environment variable: names changes of FastDeploy's bodies with which a server starts although these must hold."""


class PointState(enum.Enum):
    """What became of one row in this process."""

    WAITING = "waiting for its module"
    DEFERRED = "its module is being imported"
    APPLIED = "applied"
    FAILED = "failed"


@source("overlay")
class Overlay:
    """One table in one process. Thread-safe; import hooks run under the import lock."""

    num_changed_bodies: int = gauge(
        "Functions and classes of FastDeploy whose source differs from the one this package was written for",
        "changed_bodies",
    )
    """Of those that our code relies on, as `start` found them."""

    def __init__(self, table: PatchTable, root: Path) -> None:
        self.table = table
        self._root = root
        self._states = dict.fromkeys(table.rows, PointState.WAITING)
        self._lock = renewed_in_children(threading.RLock())
        self.num_changed_bodies = 0

    def start(self) -> None:
        """Check every row, then patch what is imported and hook what is not.

        Raises `OverlayError`, with nothing patched, naming every target that is missing or drifted, and bodies that
        must not have changed.
        """
        if problems := self.problems():
            raise OverlayError(
                f"FastDeploy at {self._root} is not the {self.table.release} that the patch table was written for "
                f"({self.table.commit}): {'; '.join(f'{row.target} {problem}' for row, problem in problems.items())}. "
                f"Run `fastdeploy-kvcache doctor`, or unset {SWITCH}"
            )
        self._look_at_bodies()
        for module in dict.fromkeys(row.module for row in self.table.rows):
            loaded = sys.modules.get(module)
            if loaded is None:
                wrapt.register_post_import_hook(self._module_imported, module)
            elif _is_half_imported(loaded):
                self._set_states(module, PointState.DEFERRED)
            else:
                self._module_imported(loaded)

    def problems(self) -> dict[PatchRow, str]:
        """Rows whose target in FastDeploy's source is not as expected."""
        checked = {row: check_row(self._root, row) for row in self.table.rows}
        return {row: problem for row, problem in checked.items() if problem is not None}

    def changed_bodies(self) -> list[Change]:
        """Bodies of FastDeploy's that our code relies on, and that are not those that the table was written for."""
        if not self.table.bodies:
            return []
        return changes(self._root, self.table, known_digests(self.table.release))

    def _look_at_bodies(self) -> None:
        """One line of warning, or an error where it would not be safe to go on."""
        changed = self.changed_bodies()
        self.num_changed_bodies = len(changed)
        if not changed:
            return
        known = f"the {self.table.release} ({self.table.commit}) that this package was written for"
        must = [each for each in changed if each.must_hold]
        if must and os.getenv(UNKNOWN_BODIES) != acceptance(must):
            raise OverlayError(
                f"FastDeploy at {self._root} is another one inside than {known}: {'; '.join(map(str, must))}. Upgrade "
                f"this package. {UNKNOWN_BODIES}={acceptance(must)} starts with these changes alone; tokens may "
                "be wrong then, so read them first (docs/develop/porting.md)"
            )
        logger.warning(
            "FastDeploy at %s has %d functions that are others inside than in %s: fastdeploy-kvcache doctor names them",
            self._root,
            len(changed),
            known,
        )

    def lost_settings(self) -> list[str]:
        """What the table leaves out of the names of stored blocks, and this FastDeploy does not have."""
        return lost_settings(self._root, self.table)

    def states(self) -> dict[PatchRow, PointState]:
        with self._lock:
            return dict(self._states)

    def complete(self) -> None:
        """Patch the modules that were half imported at `start`. Raises `OverlayError` if one still is."""
        with self._lock:
            deferred = {row.module for row, state in self._states.items() if state is PointState.DEFERRED}
            for name in sorted(deferred):
                module = sys.modules.get(name)
                if module is None or _is_half_imported(module):
                    raise OverlayError(f"{name} is still being imported: the overlay cannot be completed")
                self._module_imported(module)

    def require_complete(self, where: Where) -> None:
        """Raises `OverlayError` unless every row for `where` is applied, or its module not imported at all."""
        self.complete()
        for row, state in self.states().items():
            waiting = state is PointState.WAITING and row.module in sys.modules
            if row.where in (where, Where.BOTH) and (waiting or state is PointState.FAILED):
                raise OverlayError(f"{row.target} is not patched ({state.value}): refusing to serve")

    def _module_imported(self, module: ModuleType) -> None:
        name = module.__name__
        with self._lock:
            for row in self.table.rows:
                if row.module == name and self._states[row] is not PointState.APPLIED:
                    self._states[row] = PointState.FAILED  # unless the next line returns
                    _apply(row, module)
                    self._states[row] = PointState.APPLIED
                    logger.debug("%s: %s", row.kind.value, row.target)

    def _set_states(self, module: str, state: PointState) -> None:
        for row in self.table.rows:
            if row.module == module:
                self._states[row] = state


def _is_half_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _apply(row: PatchRow, module: ModuleType) -> None:
    *outer, name = row.qualname.split(".")
    owner: Any = module
    try:
        for part in outer:
            owner = getattr(owner, part)
        target = vars(owner)[name]
    except (AttributeError, KeyError):
        raise OverlayError(f"{row.target} is missing although FastDeploy's source has it") from None
    ours = _load(row.ours)
    if row.kind is Kind.EXTEND:
        ours(target)
        return
    found, expected = runtime_parameters(target), expected_parameters(row.signature)
    if found != expected:
        raise OverlayError(f"{row.target} takes {found}, not {expected}: did another plugin replace it?")
    if row.kind is Kind.WRAP:
        wrapt.wrap_function_wrapper(module, row.qualname, ours)
    else:
        setattr(owner, name, ours(target))


def _load(reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


_active: Overlay | None = None
_refusal: Exception | None = None


def start() -> Overlay | None:
    """Start the overlay of this process, once. None when there is nothing to patch: no FastDeploy, or one that
    needs no help.

    Raises `OverlayError` when FastDeploy is not a release we know, and again each time after a start that failed:
    something may be patched by then, and a caller that goes on after an error must not get an unpatched FastDeploy.
    """
    global _active, _refusal
    if _refusal is not None:
        raise OverlayError(f"the overlay could not be started in this process: {_refusal}") from _refusal
    if _active is None:
        fastdeploy = installed_fastdeploy()
        if fastdeploy is None:
            return None
        if fastdeploy.has_own_manager:
            logger.warning(OWN_MANAGER)
            return None
        guard()
        overlay = overlay_for(fastdeploy)
        try:
            overlay.start()
        except Exception as error:
            _refusal = error
            raise
        _active = overlay
    return _active


def overlay_for(fastdeploy: FastDeployTree) -> Overlay:
    return Overlay(table_for(fastdeploy.release), fastdeploy.root)


def active() -> Overlay:
    """The overlay of this process. Raises `OverlayError` when none was started."""
    if _active is None:
        raise OverlayError("the overlay was not started in this process")
    return _active
