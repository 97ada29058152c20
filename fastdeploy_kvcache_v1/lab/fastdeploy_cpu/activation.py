"""Start of the CPU worker's patch table in this process."""

from __future__ import annotations

from ...errors import OverlayError
from ...fastdeploy_integration.overlay.overlay import Overlay
from ...fastdeploy_integration.overlay.release import installed_fastdeploy
from ...fastdeploy_integration.overlay.table import PatchTable, Where, known_releases, load_table, table_directory
from ...forks import guard

TABLE_NAME = "cpu-worker-{release}.toml"

_active: Overlay | None = None


def start() -> Overlay:
    """Call it before FastDeploy is imported. Raises `OverlayError` without a supported FastDeploy."""
    global _active
    fastdeploy = installed_fastdeploy()
    if fastdeploy is None:
        raise OverlayError("got no FastDeploy: install it, or name its checkout in PYTHONPATH")
    guard()
    _active = Overlay(table_for(fastdeploy.release), fastdeploy.root)
    _active.start()
    return _active


def table_for(release: str) -> PatchTable:
    """Raises `OverlayError` for a release without a table."""
    known = known_releases(TABLE_NAME)
    if release not in known:
        raise OverlayError(f"got FastDeploy {release}, the CPU worker expects one of {', '.join(known)}: install it")
    return load_table(table_directory() / TABLE_NAME.format(release=release))


def require_complete(where: Where) -> None:
    """See `Overlay.require_complete`."""
    if _active is None:
        raise OverlayError("the CPU worker's patches were not started in this process: report this")
    _active.require_complete(where)
