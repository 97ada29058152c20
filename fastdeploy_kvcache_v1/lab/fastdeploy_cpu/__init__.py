"""FastDeploy's own server on a machine without a GPU: `fastdeploy-kvcache serve --fastdeploy-cpu`.

The embedded engine's model computes behind FastDeploy's worker interface. Everything above it is FastDeploy itself: API
server, scheduler, queues, prefix cache. `supervisor` starts and watches it, `launch` is the start of each of its
processes, `hooks` lists what is changed in them, `worker`, `runner` and `batch_rows` are the worker.

Here are the environment variables through which the processes of one server find each other.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ...fastdeploy_integration.settings import RUN_DIRECTORY

RANK_PIPES = "FASTDEPLOY_KVCACHE_CPU_RANKS"
"""File descriptors of a rank's pipes to the others, which it inherits."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The command ends with each of them."""


def run_directory() -> Path:
    """Raises `KeyError` in a process that is not part of such a server."""
    return Path(os.environ[RUN_DIRECTORY])
