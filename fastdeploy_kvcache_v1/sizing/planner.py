"""Planner: makes plans of a running server, each in a process of the lowest priority.

A plan takes seconds of a core, so it is made when a client asks. A gauge would need one a minute, or a rough estimate.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from ..contract.plan import Plan
from ..scheduler.cache_manager import CacheManager
from ..scheduler.traffic.log import Traffic
from ..switch import SWITCH

logger = logging.getLogger(__name__)

LASTS_S = 60.0
TIMEOUT_S = 300.0


class Task(msgspec.Struct, frozen=True):
    traffic: Traffic
    config: dict[str, Any]
    """Fields of the real cache's `KVCacheConfig`."""


class Planner:
    """Thread-safe. Costs nothing until it is asked."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._made_at = 0.0
        self._is_making = False

    def plan(self) -> Plan:
        """Return a plan of the last minute, or begin one: ask again while it is not ready. Takes milliseconds."""
        with self._lock:
            if self._is_making:
                return Plan(is_ready=False)
            if self._plan is not None and time.monotonic() < self._made_at + LASTS_S:
                return self._plan
            self._is_making = True
        threading.Thread(target=self._make, name="planner", daemon=True).start()
        return Plan(is_ready=False)

    def _make(self) -> None:
        try:
            plan = self._made()
        except Exception as error:  # the edge of the thread
            logger.warning("what other sizes would hit cannot be computed: %s", error)
            plan = Plan(failure=f"the computation failed: {error}")
        with self._lock:
            self._plan, self._made_at, self._is_making = plan, time.monotonic(), False

    def _made(self) -> Plan:
        config = replace(self._manager.config, num_device_blocks=self._manager.num_device_blocks)
        task = msgspec.msgpack.encode(Task(self._manager.traffic(), asdict(config)))
        root = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([root, *sys.path[1:]]))
        environment.pop(SWITCH, None)  # the process is no part of FastDeploy
        command = [sys.executable, "-m", __package__]
        done = subprocess.run(command, input=task, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        return msgspec.msgpack.decode(done.stdout, type=Plan)
