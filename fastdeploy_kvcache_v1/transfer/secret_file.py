"""The secret that prefill servers, decode servers and their router share."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ..config import cache_directory
from ..errors import ConfigError, ModelFetchError
from .settings import require_secret

__all__ = ["read_secret"]

MAX_BYTES = 4096


def read_secret(path: Path | None) -> bytes:
    """What the file holds, without white space around it. Without a path, this user's file, made if need be.

    Raises `ConfigError` for a file that cannot be read or made, others can read, or that holds too little.
    """
    try:
        if path is None:
            path = _users_file()
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"others can read the secret in {path}: run `chmod 600 {path}`")
            secret = file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"the shared secret cannot be read: {error}") from None
    except ModelFetchError:
        raise ConfigError("this user has no home directory for a shared secret: give --peer-secret-file") from None
    if len(secret) > MAX_BYTES:
        raise ConfigError(f"the secret in {path} has more than {MAX_BYTES} bytes: is that the right file?")
    return require_secret(secret)


def _users_file() -> Path:
    """Whichever server is first makes it, and the others read the same: a link never replaces a file."""
    directory = cache_directory()
    path = directory / "peer-secret"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory) as file:  # mode 0600
            file.write(os.urandom(32).hex().encode())
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    return path
