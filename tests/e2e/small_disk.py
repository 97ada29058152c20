"""A disk of a few MiB that only one server and its children see. It fills up, and becomes read-only when told so.

A tmpfs in a mount namespace of the server's own: that needs no rights where users may make namespaces, and nothing is
left of it when the server has ended.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@functools.cache
def _why_not() -> str | None:
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return f"no mount namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def needs_small_disk() -> pytest.MarkDecorator:
    reason = _why_not()
    return pytest.mark.skipif(reason is not None, reason=reason or "")


class SmallDisk:
    """Mounted at `path`, for the process that is started with `wrapper`."""

    def __init__(self, path: Path, mib: int) -> None:
        path.mkdir()
        self._path = path
        mount = f'mount -t tmpfs -o size={mib}m,mode=700 none "$0" && exec "$@"'
        self.wrapper = (*NAMESPACE, "sh", "-c", mount, str(path))

    def seen_by(self, pid: int) -> Path:
        """Where others find what `pid` sees there."""
        return Path(f"/proc/{pid}/root{self._path}")

    def make_read_only(self, pid: int) -> None:
        """Files that are open for writing stay so, as nothing can be mounted read-only that has some."""
        self._run(pid, 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"')

    def make_writable(self, pid: int) -> None:
        self._run(pid, 'umount "$0"')

    def _run(self, pid: int, command: str) -> None:
        enter = ("nsenter", "--target", str(pid), "--user", "--mount", "--preserve-credentials")
        subprocess.run([*enter, "sh", "-c", command, str(self._path)], check=True)
