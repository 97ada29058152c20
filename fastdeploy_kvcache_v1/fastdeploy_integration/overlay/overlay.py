"""Overlay: apply a patch table to FastDeploy as its modules are imported, all of it or none.

The whole table is checked against FastDeploy's source before the first patch, and each target again when its module has
been imported. `require_complete` keeps a half-applied overlay from serving.
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
"""Environment variable with the `acceptance` of changed bodies: a server starts with exactly these."""


class PointState(enum.Enum):
    WAITING = "waiting for its module"
    DEFERRED = "its module is being imported"
    APPLIED = "applied"
    FAILED = "failed"


@source("overlay")
class Overlay:
    """One table in one process. Thread-safe; import hooks run under the import lock."""

    num_changed_bodies: int = gauge(
        "Functions of FastDeploy that differ from those that this package was written for", "changed_bodies"
    )

    def __init__(self, table: PatchTable, root: Path) -> None:
        self.table = table
        self._root = root
        self._states = dict.fromkeys(table.rows, PointState.WAITING)
        self._lock = renewed_in_children(threading.RLock())
        self.num_changed_bodies = 0

    def start(self) -> None:
        """Check all rows and bodies, then patch or hook modules. Raises `OverlayError` before the first patch."""
        if problems := self.problems():
            raise OverlayError(
                f"patch table does not fit: FastDeploy at {self._root} is not the {self.table.release} "
                f"({self.table.commit}) of the table: "
                f"{'; '.join(f'{row.target} {problem}' for row, problem in problems.items())}. Install that release, "
                f"upgrade fastdeploy-kvcache-v1, or unset {SWITCH}; `fastdeploy-kvcache doctor` lists all patch points"
            )
        self._look_at_bodies()
        for module in dict.fromkeys(row.module for row in self.table.rows):
            loaded = sys.modules.get(module)
            if loaded is None:
                wrapt.register_post_import_hook(self._module_imported, module)
            elif _is_half_imported(loaded):
                rows = [row for row in self.table.rows if row.module == module]
                self._states.update(dict.fromkeys(rows, PointState.DEFERRED))
            else:
                self._module_imported(loaded)

    def problems(self) -> dict[PatchRow, str]:
        """Rows that do not fit FastDeploy's source, each with the reason."""
        checked = {row: check_row(self._root, row) for row in self.table.rows}
        return {row: problem for row, problem in checked.items() if problem is not None}

    def changed_bodies(self) -> list[Change]:
        """Watched bodies whose digests are not those of the table's release."""
        if not self.table.bodies:
            return []
        return changes(self._root, self.table, known_digests(self.table.release))

    def _look_at_bodies(self) -> None:
        """Warn of changed bodies. Raises `OverlayError` if one of them must hold and was not accepted."""
        changed = self.changed_bodies()
        self.num_changed_bodies = len(changed)
        if not changed:
            return
        known = f"the {self.table.release} ({self.table.commit}) of the patch table"
        must = [each for each in changed if each.must_hold]
        if must and os.getenv(UNKNOWN_BODIES) != acceptance(must):
            raise OverlayError(
                f"changed functions: FastDeploy at {self._root} differs from {known}: {'; '.join(map(str, must))}. "
                "Upgrade fastdeploy-kvcache-v1, or compare the functions (docs/develop/porting.md): "
                f"{UNKNOWN_BODIES}={acceptance(must)} starts with these changes alone, and tokens may be wrong"
            )
        logger.warning(
            "changed functions: FastDeploy at %s differs from %s in %d: `fastdeploy-kvcache doctor` names them",
            self._root,
            known,
            len(changed),
        )

    def lost_settings(self) -> list[str]:
        """Settings in the table's `not_in_names` that this FastDeploy lacks."""
        return lost_settings(self._root, self.table)

    def states(self) -> dict[PatchRow, PointState]:
        with self._lock:
            return dict(self._states)

    def complete(self) -> None:
        """Patch modules that were being imported at `start`. Raises `OverlayError` if one still is."""
        with self._lock:
            deferred = {row.module for row, state in self._states.items() if state is PointState.DEFERRED}
            for name in sorted(deferred):
                module = sys.modules.get(name)
                if module is None or _is_half_imported(module):
                    raise OverlayError(f"{name} is still being imported, so its patches cannot be applied: report this")
                self._module_imported(module)

    def require_complete(self, where: Where) -> None:
        """Raises `OverlayError` unless each row for `where` is applied or its module is not imported."""
        self.complete()
        for row, state in self.states().items():
            waiting = state is PointState.WAITING and row.module in sys.modules
            if row.where in (where, Where.BOTH) and (waiting or state is PointState.FAILED):
                raise OverlayError(f"{row.target} is not patched ({state.value}), so the server ends: report this")

    def _module_imported(self, module: ModuleType) -> None:
        name = module.__name__
        with self._lock:
            for row in self.table.rows:
                if row.module == name and self._states[row] is not PointState.APPLIED:
                    self._states[row] = PointState.FAILED  # unless the next line returns
                    _apply(row, module)
                    self._states[row] = PointState.APPLIED
                    logger.debug("%s: %s", row.kind.value, row.target)


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
        raise OverlayError(f"{row.target} is missing from its imported module: remove other plugins") from None
    ours = _load(row.ours)
    if row.kind is Kind.EXTEND:
        ours(target)
        return
    found, expected = runtime_parameters(target), expected_parameters(row.signature)
    if found != expected:
        raise OverlayError(f"{row.target} takes {found}, expected {expected}: remove other plugins that replace it")
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
    """Start the overlay of this process, once. None without FastDeploy, or for one with a v1 manager of its own.

    Raises `OverlayError` for an unknown release. After a start that failed each call raises: some modules may be
    patched, and the caller must not get an unpatched FastDeploy.
    """
    global _active, _refusal
    if _refusal is not None:
        raise OverlayError(f"FastDeploy was not patched in this process: {_refusal}") from _refusal
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
    """The overlay of this process. Raises `OverlayError` if it was not started."""
    if _active is None:
        raise OverlayError(f"FastDeploy is not patched in this process: set {SWITCH}=1 before it is imported")
    return _active
