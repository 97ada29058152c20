"""The patch table of the CPU worker in this process."""

from __future__ import annotations

from ...errors import OverlayError
from ..overlay.overlay import Overlay
from ..overlay.release import installed_host
from ..overlay.table import Where, load_table, table_directory

TABLE_NAME = "cpu-worker-{release}.toml"

_active: Overlay | None = None


def start() -> Overlay:
    """Before anything of the host is imported. Raises `OverlayError` when there is no host that we know."""
    global _active
    host = installed_host()
    if host is None:
        raise OverlayError("FastDeploy is not installed: `serve --fastdeploy-cpu` runs its server")
    path = table_directory() / TABLE_NAME.format(release=host.release)
    if not path.is_file():
        raise OverlayError(f"FastDeploy {host.release} is not known to the CPU worker: install release 2.5 or 2.6")
    _active = Overlay(load_table(path), host.root)
    _active.start()
    return _active


def require_complete(where: Where) -> None:
    """Raises `OverlayError` unless everything that matters in this kind of process is patched."""
    if _active is None:
        raise OverlayError("the CPU worker's patches were not started in this process")
    _active.require_complete(where)
