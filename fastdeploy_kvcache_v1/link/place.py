"""Paths of our sockets: one directory per engine, which only this user can enter."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ..errors import ConfigError

NAME = "link"

MAX_SOCKET_PATH = 107
"""Bytes of the longest path of a unix socket."""


def socket_path(queue_port: int) -> Path:
    """Path of the socket of the engine with this worker queue port, in a directory of its own."""
    directory, own = Path(tempfile.gettempdir()), f"fd-kvcache-{os.getuid()}-{queue_port}"
    if len(os.fsencode(directory / own / NAME)) > MAX_SOCKET_PATH:
        directory = Path("/tmp")
    return directory / own / NAME


def make_private(directory: Path) -> None:
    """Raises `ConfigError` unless it is a directory that only this user can enter."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the directory {directory}: {error}; set TMPDIR to another place") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} is not a directory that only this user can enter: remove it, or set TMPDIR to another place"
        )
