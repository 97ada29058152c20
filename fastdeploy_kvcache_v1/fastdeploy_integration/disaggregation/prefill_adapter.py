"""PrefillAdapter: the adapter of a prefill server.

FastDeploy gives a request its seat and all its blocks before it asks a decode server for room, and schedules it later.
So it gets blocks of its own first, and is matched when it is put into a batch, as on a mixed server: its swap-ins ride
on the batch that computes it, and what a lost batch leaves behind is one request's. What a batch computes is known when
the batch is there, not when FastDeploy first says so: 2.6 says it before a decode server has answered.

A request has blocks for its whole prompt or none, also when it was preempted: FastDeploy asks for no more when it goes
on with a chunk, and of two requests with a part of their blocks each, neither could go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...contract.messages import DeviceSlot, MatchResult
from ..engine.adapter import PrefixCacheAdapter
from ..engine.fastdeploy_gauges import match_metrics
from ..transport import RunningRow, TaskKind


class PrefillAdapter(PrefixCacheAdapter):
    """Its workers need nothing from it: a lease is opened by the task of its request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unmatched: dict[str, Any] = {}
        """Requests with blocks of their own that no batch had yet, by id."""
        self._starting: Any = None
        """The one that is being put into the batch."""
        self._spare: dict[str, tuple[Any, list[DeviceSlot]]] = {}
        """Until the batch is there, by id, with its request: own blocks whose place cached ones took. Without them
        there might be too few when the match is rolled back, since others can have the cached ones as well.
        """

    def request_match_blocks(self, task: Any, block_size: int, *_: Any) -> tuple[list[DeviceSlot], int, dict[str, Any]]:
        """Nothing, for a request that FastDeploy gives its blocks: `start` matches it."""
        with self._lock:
            if task is self._starting or task.status.name == "PREEMPTED":
                return super().request_match_blocks(task, block_size)
            self._unmatched[task.request_id] = task
            task.num_cached_blocks = 0
            self.expect(())  # what it will find is evicted last, also for its own blocks
            return [], 0, match_metrics(MatchResult(task.request_id, (), self._block_size), ())

    def may_match(self, task: Any) -> bool:
        """One that has a seat and no blocks, since it was preempted, waits for room for all of them."""
        has_seat = task is not self._starting and task.idx is not None
        with self._lock:
            is_short = has_seat and not self.can_allocate_gpu_blocks(self._num_blocks_of(task))
        return not is_short and super().may_match(task)

    def start(self, task: Any, match: Callable[[Any], bool]) -> None:
        """FastDeploy puts `task` into the batch: what is cached of it takes the place of its own blocks. `match` is
        FastDeploy's, which sets the request's table and counts; the table is as long as before, or as its prompt.
        """
        with self._lock:
            num_own, is_unmatched = len(task.block_tables), self._take_unmatched(task)
            num_spare = self._match_now(task, match) if is_unmatched else 0
            self._lend_rest(task, max(num_own, self._num_blocks_of(task)))
            if is_unmatched and num_own:
                self._spare[task.request_id] = task, self.allocate_gpu_blocks(num_spare, task.request_id)

    def _match_now(self, task: Any, match: Callable[[Any], bool]) -> int:
        """Returns how many blocks of the match were on the device."""
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
        return len(task.block_tables) - self._batch.num_loading_tokens_of(task.request_id) // self._block_size

    def _take_unmatched(self, task: Any) -> bool:
        """Whether it was one; it is none any more. Another request may have its id."""
        is_unmatched = self._unmatched.get(task.request_id) is task
        if is_unmatched:
            del self._unmatched[task.request_id]
        return is_unmatched

    def _num_blocks_of(self, task: Any) -> int:
        return self.get_required_block_num(int(task.need_prefill_tokens), self._block_size)

    def _lend_rest(self, task: Any, num_blocks: int) -> None:
        """There is room: for its own blocks, of which a match needs at most one for each that it finds, or because it
        was matched only with room for its prompt.
        """
        task.block_tables.extend(self.allocate_gpu_blocks(num_blocks - len(task.block_tables), task.request_id))

    def expect(self, line: Sequence[Any]) -> None:
        with self._lock:
            super().expect([*self._unmatched.values(), *line])

    def release_block_ids(self, task: Any) -> None:
        with self._lock:
            self._take_unmatched(task)
            self._end_spare(task)
            super().release_block_ids(task)

    def _end_spare(self, task: Any) -> None:
        super().recycle_gpu_blocks(self._take_spare(task) or [], task.request_id)

    def _take_spare(self, task: Any) -> list[DeviceSlot] | None:
        """None for a request that had no blocks of its own. Another request may have its id."""
        owner, slots = self._spare.get(task.request_id, (None, []))
        if owner is not task:
            return None
        del self._spare[task.request_id]
        return slots

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """FastDeploy says it when blocks are given out, or computed: `send_swaps` knows."""

    def send_swaps(self, tasks: Sequence[Any], running: Sequence[RunningRow] | None = None) -> None:
        for task in tasks:
            if task.task_type.value == TaskKind.PREFILL:
                super().update_cache_blocks(task, self._block_size, task.num_computed_tokens)
                self._end_spare(task)
        super().send_swaps(tasks, running)

    def _roll_back_unscheduled(self) -> None:
        """All first: one may have the blocks that another one's match loads."""
        matched = [(task, len(task.block_tables)) for task in self._batch.matched()]
        super()._roll_back_unscheduled()
        for task, num_blocks in matched:
            if self._unmatched.get(task.request_id) is task:
                self._lend_rest(task, num_blocks)

    def _roll_back(self, task: Any) -> None:
        """What had blocks of its own has them again. What had none, since it was preempted, has none."""
        own, spare = task.block_tables[task.num_cached_blocks :], self._take_spare(task)
        super()._roll_back(task)
        if spare is None:
            super().recycle_gpu_blocks(own, task.request_id)
        else:
            task.block_tables, task.num_computed_tokens = [*own, *spare], 0
            self._unmatched[task.request_id] = task

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        with self._lock:
            self._unmatched.clear()
            self._spare.clear()
            super().reset(wait_for_tasks_done)
