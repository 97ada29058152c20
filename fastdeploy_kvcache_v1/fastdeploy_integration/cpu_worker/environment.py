"""Environment variables through which the processes of one server find each other."""

from __future__ import annotations

import os
from pathlib import Path

RUN_DIRECTORY = "FASTDEPLOY_KVCACHE_CPU_RUN"
"""Private directory of one server. Every process of the server carries it, so it also marks them."""

COPY_FAULTS = "FASTDEPLOY_KVCACHE_COPY_FAULTS"
"""Test hook, see `worker/runtime/copy_faults.py`."""

LOG_DIRECTORY = "FD_LOG_DIR"
"""FastDeploy's own."""


def run_directory() -> Path:
    """Raises `KeyError` in a process that is not part of such a server."""
    return Path(os.environ[RUN_DIRECTORY])


def log_directory() -> Path:
    return Path(os.environ.get(LOG_DIRECTORY, "log"))
