"""How swap messages travel from FastDeploy's scheduler to its workers: as an attribute of the first task of a batch.

FastDeploy rebuilds its task lists on the way, but task objects survive, pickled once.
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
"""Of a task: the `SwapMessage` that rides on it."""

ROWS_ATTRIBUTE = "_kvcache_v1_rows"
"""Of a task: the rows that its batch leaves running, each a `RunningRow`."""

RunningRow = tuple[int, int]
"""Row, and how many tokens of its sequence the engine has, the last of them without KV; 0 until it decodes."""


class TaskKind(IntEnum):
    """What the engine asks of a worker, one task at a time: names and values of FastDeploy's `RequestType`."""

    PREFILL = 0
    DECODE = 1
    PREEMPTED = 2
    EXTEND = 3
    ABORT = 4


class SwapOutbox:
    """The scheduler's end. Not thread-safe: the schedule loop owns it."""

    def __init__(self) -> None:
        self._encoder = SwapEncoder()
        self._carrier: Any = None
        self._names_rows: Any = None
        self._carries_copies = False
        self._is_restarted = False

    def attach(
        self,
        tasks: Sequence[Any],
        step: SwapStep,
        *,
        always: bool = False,
        running: Sequence[RunningRow] | None = None,
    ) -> None:
        """Let `step` ride on the first of `tasks` (at least one). One without copies stays here, but for the first one
        after a restart: when it has arrived, what was sent before it will not arrive any more. `always`: every batch
        shall tell that it has arrived. `running`: rows that the batch leaves running; None for a worker without use
        for them. They ride on every batch, and one that is lost is made up for by the next.
        """
        self.clear()
        if running is not None:
            self._names_rows = tasks[0]
            setattr(tasks[0], ROWS_ATTRIBUTE, tuple(running))
        if step or self._is_restarted or always:
            self._carries_copies = bool(step) or self._is_restarted
            self._is_restarted = False
            self._carrier = tasks[0]
            setattr(self._carrier, SWAP_ATTRIBUTE, self._encoder.encode(step))

    @property
    def is_loaded(self) -> bool:
        """A message is on its way on the last batch."""
        return self._carrier is not None

    @property
    def carries_copies(self) -> bool:
        """With that message copies would be lost, or the only word that earlier ones have ended."""
        return self.is_loaded and self._carries_copies

    def clear(self) -> None:
        """The last batch has been sent. FastDeploy uses one object for every chunk of a request: its message goes."""
        if self._carrier is not None:
            vars(self._carrier).pop(SWAP_ATTRIBUTE, None)
            self._carrier = None
        if self._names_rows is not None:
            vars(self._names_rows).pop(ROWS_ATTRIBUTE, None)
            self._names_rows = None

    def restart(self) -> None:
        """See `SwapEncoder.restart`."""
        self._encoder.restart()
        self._is_restarted = True


class SwapInbox:
    """A worker's end."""

    def __init__(self) -> None:
        self._decoder = SwapDecoder()

    def take(self, tasks: Iterable[Any]) -> list[SwapStep]:
        """The steps that ride on `tasks`, in order, taken off them. Raises as `SwapDecoder.decode`."""
        return [self._decoder.decode(message) for message in _take(SWAP_ATTRIBUTE, tasks)]


def take_running(tasks: Iterable[Any]) -> Sequence[RunningRow] | None:
    """The rows that the latest of the batches in `tasks` leaves running, taken off them; None where no batch says."""
    named = _take(ROWS_ATTRIBUTE, tasks)
    return named[-1] if named else None


def take_off(request: Any) -> None:
    """Of a request that comes in: FastDeploy makes every key of a body's `metadata` an attribute."""
    for name in (SWAP_ATTRIBUTE, ROWS_ATTRIBUTE):
        vars(request).pop(name, None)


def _take(name: str, tasks: Iterable[Any]) -> list[Any]:
    """What the engine attached as `name`, taken off `tasks`. It attaches tuples, which no JSON holds."""
    found = [vars(task).pop(name) for task in tasks if name in vars(task)]
    attached = [each for each in found if isinstance(each, tuple)]
    if len(attached) < len(found):
        logger.error("%s of %d requests is not from the engine: ignored", name, len(found) - len(attached))
    return attached
