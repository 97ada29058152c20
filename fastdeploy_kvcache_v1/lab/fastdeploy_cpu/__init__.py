"""FastDeploy's own server without a GPU: `fastdeploy-kvcache serve --fastdeploy-cpu`.

The embedded engine's model computes behind FastDeploy's worker interface; API server, scheduler and queues are
FastDeploy's. `supervisor` starts and watches the server, `launch` starts each of its processes, `hooks` has their
patches, and `worker`, `runner` and `batch_rows` are the worker.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ...fastdeploy_integration.settings import RUN_DIRECTORY

RANK_PIPES = "FASTDEPLOY_KVCACHE_CPU_RANKS"
"""Variable with the inherited file descriptors of a rank's pipes to the others."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the command."""


def run_directory() -> Path:
    """Raises `KeyError` in a process of no such server."""
    return Path(os.environ[RUN_DIRECTORY])
