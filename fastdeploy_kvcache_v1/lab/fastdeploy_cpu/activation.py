"""The patch table of the CPU worker in this process."""

from __future__ import annotations

from ...errors import OverlayError
from ...fastdeploy_integration.overlay.overlay import Overlay
from ...fastdeploy_integration.overlay.release import installed_fastdeploy
from ...fastdeploy_integration.overlay.table import PatchTable, Where, known_releases, load_table, table_directory
from ...forks import guard

TABLE_NAME = "cpu-worker-{release}.toml"

_active: Overlay | None = None


def start() -> Overlay:
    """Call it before anything of FastDeploy is imported. Raises `OverlayError` without a FastDeploy that we know."""
    global _active
    fastdeploy = installed_fastdeploy()
    if fastdeploy is None:
        raise OverlayError("FastDeploy is not installed: `serve --fastdeploy-cpu` runs its server")
    guard()
    _active = Overlay(table_for(fastdeploy.release), fastdeploy.root)
    _active.start()
    return _active


def table_for(release: str) -> PatchTable:
    """The CPU worker's table for `release`. Raises `OverlayError` when there is none."""
    known = known_releases(TABLE_NAME)
    if release not in known:
        raise OverlayError(f"FastDeploy {release} is not known to the CPU worker: install one of {', '.join(known)}")
    return load_table(table_directory() / TABLE_NAME.format(release=release))


def require_complete(where: Where) -> None:
    """Raises `OverlayError` unless everything that matters in this kind of process is patched."""
    if _active is None:
        raise OverlayError("the CPU worker's patches were not started in this process")
    _active.require_complete(where)
