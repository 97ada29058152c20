"""Messager: answers what FastDeploy's engine asks of its messager process, which is never started, on a prefill server.

The engine tells the messager of every transfer, and waits until it has read that; and it holds a first token back until
the messager has said how the transfer went. Both goes over the queue between engine and workers, where FastDeploy puts
the words of several ranks together by the order in which they come. Transfers end in any order: here they have names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class Messager:
    """Any thread of the engine."""

    def __init__(self, take_ends: Callable[[], Sequence[list[str]]], *, acknowledges: bool) -> None:
        """`take_ends`: request id and status of the transfers that have ended since it was called last.
        `acknowledges`: see `Capabilities.acknowledged_cache_info`.
        """
        self._take_ends = take_ends
        self._acknowledges = acknowledges
        self._untold: SimpleQueue[str] = SimpleQueue()

    def answer(self, queue: Any) -> None:
        """From now on, in the place of `queue`, the engine's end of FastDeploy's EngineWorkerQueue."""
        queue.put_cache_info = self._put_cache_info
        queue.get_finished_req = self._take_ends
        if self._acknowledges:
            queue.get_finished_add_cache_task_req = self._acknowledge

    def _put_cache_info(self, infos: Sequence[dict[str, Any]]) -> None:
        """Nobody needs it: workers know the transfers from their tasks."""
        for info in infos if self._acknowledges else ():
            if "src_block_ids" in info:  # else it is what the decode server has answered
                self._untold.put(info["request_id"])

    def _acknowledge(self) -> list[str]:
        return [self._untold.get() for _ in range(self._untold.qsize())]  # one thread of the engine takes
