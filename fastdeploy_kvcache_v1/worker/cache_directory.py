"""Where a user's fetched models, shared secret and trials of copies stay."""

from __future__ import annotations

import os
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
