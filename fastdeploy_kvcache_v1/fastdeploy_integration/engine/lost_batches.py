"""Batches between FastDeploy's `schedule` and its queue for the workers; recovery of one that is lost there.

`schedule` may raise after it has put some requests into a batch, and so may `put_tasks` and the code between the two.
FastDeploy logs that and goes on as if the workers had the batch. What was in it, and what we do before the next one:

    prefill          its KV is never written: preempted, so that it starts again when the worker confirms, on a decode
                     server at prefill
    preempt, abort   the worker still writes to blocks that are free now: told again, first in the next batch
    decode, extend   the worker would wait for its new blocks for ever: told again, too

A request without a seat goes back to the waiting ones. Copies that rode on the batch are lost with it.
"""

from __future__ import annotations

import logging
import operator
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)

BATCH_VARIABLE = "scheduled_reqs"
"""The local variable of FastDeploy's `schedule` that holds the batch being put together."""

SKIPPED_VARIABLE = "skip_requests"
"""The one that holds requests of the waiting line, until it puts them at its end."""


class Batch(list[Any]):
    """A batch on its way from `schedule` to the queue; it pickles as a plain list."""

    def __init__(self, tasks: Sequence[Any], cache: Any, epoch: int) -> None:
        super().__init__(tasks)
        self.cache = cache
        self.epoch = epoch
        """The weight update before which it was scheduled."""

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, (list(self),)


class Transit:
    """The schedule loop owns it: there is one batch at a time. `cache` is the adapter."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._unsent: Sequence[Any] | None = None
        """The last batch, until it is in the queue."""
        self._again: list[Any] = []
        """Tasks of lost batches that still have to reach the workers."""

    def recover(self, manager: Any) -> None:
        """Before `manager` (FastDeploy's ResourceManagerV1) schedules: if its last batch was lost, undo it."""
        if self._unsent is not None:
            lost, self._unsent = self._unsent, None
            if lost:
                logger.warning("a batch of %d tasks did not reach the workers: its requests start again", len(lost))
            self._cache.batch_lost()
            self._again = take_back(manager, lost, preempted_leave=self._cache.preempted_leave)

    def depart(self, manager: Any, tasks: list[Any]) -> list[Any]:
        """`manager` has scheduled `tasks`. Returns the batch: first the tasks that must be sent again, then these."""
        if self._again:
            again = (task for task in self._again if self._still_holds(manager, task))
            tasks = [*again, *tasks]
            self._again = []
        self._unsent = tasks or None
        return tasks

    def failed(self, manager: Any, error: Exception) -> None:
        """`schedule` raised: what it had scheduled until then is lost, and what it had passed over waits again."""
        self._unsent = [*self._again, *_held_by_schedule(error, BATCH_VARIABLE)]
        self._again = []
        with manager.lock:
            waiting = {id(each) for each in manager.waiting}
            skipped = [each for each in _held_by_schedule(error, SKIPPED_VARIABLE) if id(each) not in waiting]
            manager.waiting.extendleft(reversed(skipped))

    def sent(self) -> None:
        """The last batch is in the queue."""
        self._unsent = None
        self._cache.batch_sent()

    def _still_holds(self, manager: Any, task: Any) -> bool:
        is_preempted = task.task_type.name == "PREEMPTED"
        return (is_preempted and self._cache.preempted_leave) or _still_holds(manager, task)

    def forget(self) -> None:
        """The workers have forgotten all requests, and every request starts again."""
        self._unsent = None
        self._again = []


def _held_by_schedule(error: Exception, variable: str) -> list[Any]:
    """What a list of FastDeploy's `schedule` held when that raised. Nothing else knows all of it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "schedule" and variable in frame.f_locals:
            return list(frame.f_locals[variable])
    return []


def take_back(manager: Any, lost: Sequence[Any], *, preempted_leave: bool = False) -> list[Any]:
    """Preempt the requests whose tokens `lost` would have computed. Returns what the workers have to be told again.
    `preempted_leave`: as on a decode server, where they end.
    """
    again = []
    with manager.lock:
        for task in lost:
            if task.task_type.name != "PREFILL":
                again.append(task)
            elif _remove(manager.running, partial(operator.is_, task)):
                again += _preempt(manager, task, leaves=preempted_leave)
        # `schedule` takes aborted requests out of the running ones late: it may have raised. Their ids do not tell.
        _remove(manager.running, lambda request: request.status.name == "PREEMPTED")
    return again


def _remove(requests: list[Any], is_meant: Callable[[Any], bool]) -> bool:
    """In place, and by identity: FastDeploy's requests are equal when their ids are."""
    others = [request for request in requests if not is_meant(request)]
    found = len(others) < len(requests)
    if found:
        requests[:] = others
    return found


def _preempt(manager: Any, request: Any, *, leaves: bool) -> list[Any]:
    """As FastDeploy does when blocks are short. Returns the task that tells the worker, for a request with a seat."""
    statuses = type(request.status)
    request.status = statuses.PREEMPTED
    request.num_computed_tokens = 0
    manager._free_blocks(request)
    request.num_cached_blocks = 0
    if leaves:
        return _leave(manager, request)
    if request.idx is not None and manager.tasks_list[request.idx] is request:
        manager.to_be_rescheduled_request_id_set.add(request.request_id)
        return [manager._prepare_preempt_task(request)]
    request.status = statuses.WAITING
    manager.waiting.appendleft(request)
    return []


def _leave(manager: Any, request: Any) -> list[Any]:
    """It has no seat any more. FastDeploy answers its client when it sends the task."""
    manager.tasks_list[request.idx], manager.stop_flags[request.idx] = None, True
    manager.requests.pop(request.request_id, None)
    manager.req_dict.pop(request.request_id, None)
    return [manager._prepare_preempt_task(request)]


def _still_holds(manager: Any, task: Any) -> bool:
    """Whether the workers still need to be told: the request may have ended meanwhile, or been preempted."""
    kind = task.task_type.name
    if kind == "PREEMPTED":
        return task.request_id in manager.to_be_rescheduled_request_id_set
    if kind == "ABORT":
        return task.request_id in manager.to_be_aborted_req_id_set
    request = manager.requests.get(task.request_id)
    if kind == "EXTEND":
        return request is not None and request.extend_block_tables is task.extend_block_tables
    return request is not None and request.block_tables is task.block_tables
