"""A storage directory: what lies where in it, and whose it is.

    DIR/format                         which version wrote this directory
    DIR/used                           bytes of the values in each shard, see `ShardSizes`
    DIR/tmp/                           files that are being written
    DIR/NAMESPACE/manifest.json        what the namespace stands for; its name is 32 hexadecimal digits
    DIR/NAMESPACE/ab/KEY               one value, in the shard ab: the first two characters of its key

Processes share it: any file and any directory may appear or vanish at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigError
from ..namespace import FORMAT_VERSION, Namespace
from .shard_sizes import ShardSizes

__all__ = [
    "FORMAT",
    "FUTURE_S",
    "MANIFEST",
    "SIZES",
    "TEMPORARY",
    "Identity",
    "has_format",
    "make_directories",
    "open_directory",
    "recognize",
    "remove_abandoned",
    "temporary_name",
]

logger = logging.getLogger(__name__)

FORMAT, SIZES, TEMPORARY, MANIFEST = "format", "used", "tmp", "manifest.json"

ABANDONED_S = 600.0
"""A file in `tmp/` that nobody wrote to for so long was left behind by a process that ended."""

FUTURE_S = 60.0
"""A time so far ahead is of a clock that was wrong."""

ROOT = 0
"""The user who can plant blocks anyway."""

_FORMAT_TEXT = f"fastdeploy-kvcache-v1 storage {FORMAT_VERSION}\n"
_HALF_FORMAT = re.compile(rf"{FORMAT}\.[0-9a-f.]+")
"""While it is being written."""


class Identity(NamedTuple):
    """Of a directory: whether it is another one, or its owner or mode has changed."""

    device: int
    inode: int
    mode: int
    owner: int

    @classmethod
    def of(cls, directory: Path) -> Identity:
        """Raises `OSError`."""
        status = directory.stat()
        return cls(status.st_dev, status.st_ino, status.st_mode, status.st_uid)


def has_format(directory: Path) -> bool:
    """True if `directory` is a storage directory. Raises `ConfigError` if another version wrote it."""
    try:
        found = (directory / FORMAT).read_text(errors="replace")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"the storage directory {directory} cannot be read: {error.strerror}") from None
    if found != _FORMAT_TEXT:
        raise ConfigError(
            f"the storage directory {directory} was written by another version ({found.strip()!r:.80}, this one writes "
            f"{_FORMAT_TEXT.strip()!r}): name another directory, or delete it: "
            f"rm -r {shlex.quote(str(directory))}"
        )
    return True


def check_directory(directory: Path) -> None:
    """Make `directory` a storage directory if need be. Raises `ConfigError` as `open_directory`."""
    if not _is_ours(directory):
        try:
            _make_root(directory)
        except OSError as error:
            raise _not_made(directory, error) from None


def open_directory(directory: Path, namespace: Namespace) -> ShardSizes | None:
    """Make what is missing for values of `namespace`. None if `directory` is a storage directory, but read-only.

    Raises `ConfigError` when it holds anything else, another version wrote it, it cannot be made, or other users own it
    or can write to it.
    """
    is_ours = _is_ours(directory)
    try:
        return _made(directory, namespace)
    except OSError as error:
        if not is_ours:
            raise _not_made(directory, error) from None
        logger.warning("%s cannot be written (%s): nothing is stored", directory, error.strerror)
        return None


def _is_ours(directory: Path) -> bool:
    """False if it is empty, or not there. Raises `ConfigError` for anything else."""
    try:
        is_empty = all(name == FORMAT or _HALF_FORMAT.fullmatch(name) for name in os.listdir(directory))
    except FileNotFoundError:
        is_empty = True
    except OSError as error:
        raise ConfigError(f"the storage directory {directory} cannot be read: {error.strerror}") from None
    is_ours = has_format(directory)  # after the listing: another process that makes the directory makes this file first
    if not is_ours and not is_empty:
        raise ConfigError(f"{directory} holds other files: give an empty or a new directory")
    return is_ours


def _not_made(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the storage directory {directory} cannot be made: {error.strerror}")


def recognize(directory: Path, opened: Identity) -> None:
    """Check a directory again that may not be what was opened. Raises `ConfigError` where a start would refuse it, or
    where it is, or would be made, on another disk: its own was unmounted. Raises `OSError`.
    """
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    found = Identity.of(place)
    if found.device != opened.device:
        raise ConfigError(f"the disk of the storage directory {directory} is gone: mount it, or restart the server")
    if place == directory and found != opened:
        _is_ours(directory)
        _require_private(directory)


def _made(directory: Path, namespace: Namespace) -> ShardSizes:
    _make_root(directory)
    with contextlib.suppress(FileNotFoundError):
        _require_private(directory / namespace.digest)
    sizes = ShardSizes(directory / SIZES)
    try:
        make_directories(directory, namespace, sizes)
    except BaseException:
        sizes.close()
        raise
    return sizes


def make_directories(directory: Path, namespace: Namespace, sizes: ShardSizes) -> None:
    """Make what is missing for values of `namespace`. Raises `OSError`, and `ConfigError` as `open_directory`.

    Directories of namespaces are made and removed only by processes that have locked `sizes`.
    """
    _make_root(directory)
    with sizes.exclusive():
        for made in (directory / TEMPORARY, directory / namespace.digest):
            made.mkdir(mode=0o700, exist_ok=True)
        _write_text(directory / namespace.digest / MANIFEST, namespace.manifest(), directory / TEMPORARY)


def _make_root(directory: Path) -> None:
    """Raises `OSError`, and `ConfigError` for a directory that is not private."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(directory)  # now that it is there: another user may have made it just before
    _write_text(directory / FORMAT, _FORMAT_TEXT, directory)


def _require_private(directory: Path) -> None:
    """Whoever owns it or can write to it can plant blocks that pass every check. Raises `ConfigError` and `OSError`."""
    status = directory.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"other users can write to the storage directory {directory} (mode {stat.S_IMODE(status.st_mode):o}): "
            "chmod 700 it, or name another"
        )
    if status.st_uid not in (ROOT, os.geteuid()):
        raise ConfigError(
            f"the storage directory {directory} belongs to user {status.st_uid}, and this process to user "
            f"{os.geteuid()}: chown it, or name another"
        )


def _write_text(path: Path, text: str, temporary_directory: Path) -> None:
    """As a whole or not at all, whatever other processes and threads do; nothing if it is there already."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text() == text:
            return
    temporary = temporary_directory / f"{path.name}.{temporary_name()}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(file, "w") as opened:
            opened.write(text)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def temporary_name() -> str:
    """That no other process has: in containers, processes have the same numbers."""
    return secrets.token_hex(8)


def remove_abandoned(directory: Path) -> None:
    """Delete what processes that ended have left half written."""
    now = time.time()
    for parent, name in ((directory, _HALF_FORMAT), (directory / TEMPORARY, re.compile(".*"))):
        with contextlib.suppress(OSError):
            if parent != directory and parent.is_symlink():
                continue
            with os.scandir(parent) as entries:
                for entry in entries:
                    if name.fullmatch(entry.name):
                        _remove_if_abandoned(entry, now)


def _remove_if_abandoned(entry: os.DirEntry[str], now: float) -> None:
    with contextlib.suppress(OSError):
        if now - ABANDONED_S <= entry.stat(follow_symlinks=False).st_mtime <= now + FUTURE_S:
            return
        if entry.is_dir(follow_symlinks=False):  # it lay in the place of a value
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
