"""Swap messages from FastDeploy's scheduler to its workers, as an attribute of the first task of a batch.

FastDeploy rebuilds task lists on the way but keeps the task objects, pickled once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from ..contract.messages import SwapStep
from ..contract.swap_message import SwapDecoder, SwapEncoder

logger = logging.getLogger(__name__)

SWAP_ATTRIBUTE = "_kvcache_v1_swaps"
"""Attribute of a task: its `SwapMessage`."""

ROWS_ATTRIBUTE = "_kvcache_v1_rows"
"""Attribute of a task: the rows that its batch leaves running, each a `RunningRow`."""

RunningRow = tuple[int, int]
"""Row, and the engine's tokens of its sequence, the last without KV; 0 until it decodes."""


class TaskKind(IntEnum):
    """Names and values of FastDeploy's `RequestType`."""

    PREFILL = 0
    DECODE = 1
    PREEMPTED = 2
    EXTEND = 3
    ABORT = 4


class SwapOutbox:
    """The scheduler's end. Not thread-safe: for the schedule loop."""

    def __init__(self) -> None:
        self._encoder = SwapEncoder()
        self._carrier: Any = None
        """First task of the last batch."""
        self.is_loaded = False
        """The last batch carries a message."""
        self.carries_copies = False
        """That message has copies, or is the first after a restart."""
        self._is_restarted = False

    def attach(
        self,
        tasks: Sequence[Any],
        step: SwapStep,
        *,
        always: bool = False,
        running: Sequence[RunningRow] | None = None,
    ) -> None:
        """Attach `step` to the first of `tasks` (at least one).

        A step without copies is attached only after a restart, where its arrival proves that no earlier message will
        follow, or with `always`, so that every batch tells its arrival. `running`: rows that the batch leaves running,
        attached to every batch; None for a worker that does not need them.
        """
        self.clear()
        self._carrier = tasks[0]
        if running is not None:
            setattr(self._carrier, ROWS_ATTRIBUTE, tuple(running))
        self.carries_copies = bool(step) or self._is_restarted
        self.is_loaded = self.carries_copies or always
        if self.is_loaded:
            self._is_restarted = False
            setattr(self._carrier, SWAP_ATTRIBUTE, self._encoder.encode(step))

    def clear(self) -> None:
        """Take the message off the last batch, which was sent: FastDeploy reuses the object for the next chunk."""
        if self._carrier is not None:
            take_off(self._carrier)
        self._carrier, self.is_loaded, self.carries_copies = None, False, False

    def restart(self) -> None:
        self._encoder.restart()
        self._is_restarted = True


class SwapInbox:
    """A worker's end."""

    def __init__(self) -> None:
        self._decoder = SwapDecoder()

    def take(self, tasks: Iterable[Any]) -> list[SwapStep]:
        """Take the steps off `tasks`, in order. Raises as `SwapDecoder.decode`."""
        return [self._decoder.decode(message) for message in _take(SWAP_ATTRIBUTE, tasks)]


def take_running(tasks: Iterable[Any]) -> Sequence[RunningRow] | None:
    """Take the running rows off `tasks`. Returns those of the latest batch; None if no batch has any."""
    named = _take(ROWS_ATTRIBUTE, tasks)
    return named[-1] if named else None


def take_off(request: Any) -> None:
    """Remove our attributes from a task, or a client's request: FastDeploy makes each key of `metadata` one."""
    for name in (SWAP_ATTRIBUTE, ROWS_ATTRIBUTE):
        vars(request).pop(name, None)


def _take(name: str, tasks: Iterable[Any]) -> list[Any]:
    """Take the attribute `name` off `tasks`. Only the engine attaches tuples: JSON has none."""
    found = [vars(task).pop(name) for task in tasks if name in vars(task)]
    attached = [each for each in found if isinstance(each, tuple)]
    if len(attached) < len(found):
        logger.error("%d requests have an attribute %s that a client set: ignored", len(found) - len(attached), name)
    return attached
