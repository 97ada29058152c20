"""PrefillAdapter: the adapter of a prefill server.

FastDeploy gives a request its seat and all its blocks before it asks a decode server for room, and schedules it later.
So it gets blocks of its own first, and is matched when it is put into a batch, as on a mixed server: its swap-ins ride
on the batch that computes it, and what a lost batch leaves behind is one request's. What a batch computes is known when
the batch is there, not when FastDeploy first says so: 2.6 says it before a decode server has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...metadata import DeviceSlot, MatchResult
from ..engine.adapter import PrefixCacheAdapter
from ..engine.hit_rates import match_metrics
from ..task_kind import TaskKind
from ..transport import RunningRow


class PrefillAdapter(PrefixCacheAdapter):
    """Its workers need nothing from it: a lease is opened by the task of its request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unmatched: dict[str, Any] = {}
        """Requests with blocks of their own that no batch had yet, by id."""
        self._starting: Any = None
        """The one that is being put into the batch."""

    def request_match_blocks(self, task: Any, block_size: int, *_: Any) -> tuple[list[DeviceSlot], int, dict[str, Any]]:
        """Nothing, for a request that FastDeploy gives its blocks: `start` matches it."""
        with self._lock:
            if task is self._starting or task.status.name == "PREEMPTED":
                return super().request_match_blocks(task, block_size)
            self._unmatched[task.request_id] = task
            task.num_cached_blocks = 0
            self.expect(())  # what it will find is evicted last, also for its own blocks
            return [], 0, match_metrics(MatchResult(task.request_id, (), self._block_size), ())

    def start(self, task: Any, match: Callable[[Any], bool]) -> None:
        """FastDeploy puts `task` into the batch: what is cached of it takes the place of its own blocks. `match` is
        FastDeploy's, which sets the request's table and counts; the table is as long as before.
        """
        with self._lock:
            if not self._take_unmatched(task):
                return
            num_blocks = len(task.block_tables)
            super().recycle_gpu_blocks(task.block_tables, task.request_id)  # the room that its host blocks need
            task.block_tables, task.num_cached_blocks = [], 0
            self._starting = task
            try:
                is_matched = match(task)
            finally:
                self._starting = None
            if not is_matched:
                super().release_block_ids(task)
                task.block_tables, task.num_cached_blocks, task.num_computed_tokens = [], 0, 0
            self._lend_rest(task, num_blocks)

    def _take_unmatched(self, task: Any) -> bool:
        """Whether it was one; it is none any more. Another request may have its id."""
        is_unmatched = self._unmatched.get(task.request_id) is task
        if is_unmatched:
            del self._unmatched[task.request_id]
        return is_unmatched

    def _lend_rest(self, task: Any, num_blocks: int) -> None:
        """No other request can have taken them: a match needs at most one free block for each that it finds."""
        task.block_tables.extend(self.allocate_gpu_blocks(num_blocks - len(task.block_tables), task.request_id))

    def expect(self, line: Sequence[Any]) -> None:
        with self._lock:
            super().expect([*self._unmatched.values(), *line])

    def release_block_ids(self, task: Any) -> None:
        with self._lock:
            self._take_unmatched(task)
            super().release_block_ids(task)

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """FastDeploy says it when blocks are given out, or computed: `send_swaps` knows."""

    def send_swaps(self, tasks: Sequence[Any], running: Sequence[RunningRow] | None = None) -> None:
        for task in tasks:
            if task.task_type.value == TaskKind.PREFILL:
                super().update_cache_blocks(task, self._block_size, task.num_computed_tokens)
        super().send_swaps(tasks, running)

    def _roll_back(self, task: Any) -> None:
        """One that was not preempted has its blocks before every match."""
        if task.status.name == "PREEMPTED":
            super()._roll_back(task)
            return
        num_blocks, own = len(task.block_tables), task.block_tables[task.num_cached_blocks :]
        super()._roll_back(task)
        task.block_tables, task.num_computed_tokens = own, 0
        if self.can_allocate_gpu_blocks(num_blocks - len(own)):  # else FastDeploy grows the table when it can
            self._lend_rest(task, num_blocks)
        self._unmatched[task.request_id] = task

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        with self._lock:
            self._unmatched.clear()
            super().reset(wait_for_tasks_done)
