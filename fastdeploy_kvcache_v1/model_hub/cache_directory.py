"""Where fetched models stay, and how processes that fetch the same one take turns."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ModelFetchError

VARIABLE = "FASTDEPLOY_KVCACHE_CACHE"
"""Names the cache directory; without it, `fastdeploy-kvcache` in the user's own."""


def cache_directory() -> Path:
    """Absolute; need not exist yet. Raises `ModelFetchError` for a user without home directory."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "fastdeploy-kvcache"
    except RuntimeError:
        raise ModelFetchError(f"this user has no home directory: set {VARIABLE} to a directory for models") from None


@contextmanager
def lock(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Held by one process at a time, given back when the process ends, however it ends.

    `on_wait` is called once, before the wait, when another process holds it.
    """
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
