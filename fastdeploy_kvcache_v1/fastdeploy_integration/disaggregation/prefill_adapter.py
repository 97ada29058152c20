"""PrefillAdapter: the adapter of a prefill server.

FastDeploy gives a request its seat and all its blocks before it asks a decode server for room, and schedules it later.
So a match is admitted until it is released, and what a batch computes is known when the batch is there, not when
FastDeploy first says so: 2.6 says it before a decode server has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.adapter import PrefixCacheAdapter
from ..task_kind import TaskKind
from ..transport import RunningRow


class PrefillAdapter(PrefixCacheAdapter):
    """Its workers need nothing from it: a lease is opened by the task of its request."""

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """FastDeploy says it when blocks are given out, or computed: `send_swaps` knows."""

    def send_swaps(self, tasks: Sequence[Any], running: Sequence[RunningRow] | None = None) -> None:
        for task in tasks:
            if task.task_type.value == TaskKind.PREFILL:
                super().update_cache_blocks(task, self._block_size, task.num_computed_tokens)
        super().send_swaps(tasks, running)

    def _roll_back_unscheduled(self) -> None:
        """A match without a batch waits for its decode server."""
