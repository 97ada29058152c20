"""Messager: the part of FastDeploy's messager process that its engine waits for, in a worker rank of a prefill server.

FastDeploy's engine tells the messager of every transfer, and waits until it has read that; and it holds a first token
back until the messager has said how the transfer went. The transfers themselves the worker knows from its tasks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

POLL_S = 0.005
RETRY_S = 1.0

FINISHED = "finished"
"""FastDeploy's word for a transfer that went well; one that failed has "error" in its text."""


class Messager:
    """`tell` never blocks. Two threads use `queue`, FastDeploy's EngineWorkerQueue: each call of it may wait."""

    def __init__(self, queue: Any, *, acknowledges: bool) -> None:
        """`acknowledges`: see `Capabilities.acknowledged_cache_info`."""
        self._queue = queue
        self._acknowledges = acknowledges
        self._untold: SimpleQueue[tuple[str, str]] = SimpleQueue()
        for work in (self._read, self._tell_next):
            name = f"kv-transfer-messager{work.__name__}"
            threading.Thread(target=self._repeat, args=(work,), name=name, daemon=True).start()

    def tell(self, request_id: str, error: str | None) -> None:
        """The transfer of a request has ended."""
        self._untold.put((request_id, FINISHED if error is None else f"error: {error}"))

    def _repeat(self, work: Callable[[], None]) -> None:
        while True:
            try:
                work()
            except Exception:  # thread edge: without its engine this process ends soon
                logger.exception("the engine's queue cannot be used")
                time.sleep(RETRY_S)

    def _read(self) -> None:
        told = [info["request_id"] for info in self._queue.get_cache_info() if "src_block_ids" in info]
        if told and self._acknowledges:
            self._queue.put_finished_add_cache_task_req(told)
        time.sleep(POLL_S)

    def _tell_next(self) -> None:
        self._queue.put_finished_req([list(self._untold.get())])
