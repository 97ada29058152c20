"""Paths of our sockets: one directory per engine, which only this user can enter."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ..errors import ConfigError
from ..forks import SOCKET_DIRECTORIES

MAX_SOCKET_PATH = 107
"""Bytes of the longest path of a unix socket."""

LONGEST_NAME = "storage-01234567-9999"


def socket_path(queue_port: int, name: str = "link") -> Path:
    """Path of socket `name` in the directory of the engine with this worker queue port, unique on its machine."""
    directory, own = Path(tempfile.gettempdir()), f"{SOCKET_DIRECTORIES}{os.getuid()}-{queue_port}"
    if len(os.fsencode(directory / own / LONGEST_NAME)) > MAX_SOCKET_PATH:
        directory = Path("/tmp")
    return directory / own / name


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
