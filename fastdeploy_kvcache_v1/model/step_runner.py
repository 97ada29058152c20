"""One step in the worker: copies, forward pass, sampling. Keeps nothing about requests between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..batch_request import BatchRequest
from ..errors import ModelError, TransferError
from ..metadata import TransferReport
from ..worker.cache_controller import CacheController
from ..worker.layer_done_counter import LayerDoneCounter
from .plan import SequenceSlice
from .sampler import sample
from .step import StepResult, StepTask

logger = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]


class Forward(Protocol):
    """`Decoder.forward`."""

    def __call__(
        self, sequences: list[SequenceSlice], caches: list[Any], before_layer: Callable[[int], None]
    ) -> list[Logits | None]: ...


class StepRunner:
    """Runs batches against one set of caches. Single-threaded.

    A copy that fails or is late costs only the requests whose blocks it was filling: they are dropped from the step
    and reported for a retry, the others are computed again without them.
    """

    def __init__(
        self,
        forward: Forward,
        controller: CacheController,
        caches: list[Any],
        *,
        block_size: int,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is called when a batch was taken, before each layer is computed, and when all of it is done."""
        self._forward = forward
        self._controller = controller
        self._caches = caches
        self._block_size = block_size
        self._on_progress = on_progress

    @property
    def has_open_copies(self) -> bool:
        """True while a submitted copy is not reported yet."""
        return self._controller.num_unreported_copies > 0

    def run(self, batch: BatchRequest) -> StepResult:
        """Raises only when the copies of the batch could not be submitted: the caches are then unusable."""
        self._on_progress()
        counter: LayerDoneCounter | None = None
        for step in batch.swap_steps:
            counter = self._controller.submit_swap_tasks(step)
        result = StepResult()
        self._compute(list(batch.requests), counter, result)
        self._on_progress()
        return StepResult(result.tokens, result.retry, result.errors, self.take_report())

    def take_report(self) -> TransferReport:
        """Copies that ended since the last report."""
        return self._controller.take_report()

    def _compute(self, tasks: list[StepTask], counter: LayerDoneCounter | None, result: StepResult) -> None:
        """Forward pass and sampling; fills `result`."""
        while tasks:
            try:
                logits = self._run_forward(tasks, counter)
            except TransferError as error:
                dropped = self._affected(tasks, counter)
                logger.warning("dropped %d of %d requests from the step: %s", len(dropped), len(tasks), error)
                result.retry.update({task.request_id: str(error) for task in dropped})
                tasks = [task for task in tasks if task.request_id not in result.retry]
                counter = None  # no remaining task reads what it was waiting for
            except Exception as error:  # the edge of a unit of work: these requests fail, the worker lives on
                logger.exception("the forward pass of %d requests failed", len(tasks))
                result.errors.update({task.request_id: f"internal error: {error!r}" for task in tasks})
                return
            else:
                _sample_all(tasks, logits, result)
                return

    def _affected(self, tasks: list[StepTask], counter: LayerDoneCounter | None) -> list[StepTask]:
        """Tasks that read a slot whose content did not arrive."""
        lost = set() if counter is None else set(counter.target_slots)
        lost.update(self._controller.failed_slots({slot for task in tasks for slot in self._slots(task)[0]}))
        affected = [task for task in tasks if not lost.isdisjoint(self._slots(task)[0])]
        # None at all: without a counter to leave out, the same pass would fail the same way again.
        return affected if affected or counter is not None else tasks

    def _run_forward(self, tasks: Sequence[StepTask], counter: LayerDoneCounter | None) -> list[Logits | None]:
        slots = [self._slots(task) for task in tasks]
        read = sorted({slot for readable, _ in slots for slot in readable})
        written = sorted({slot for _, writable in slots for slot in writable})
        slices = [
            SequenceSlice(np.asarray(task.token_ids, dtype=np.int64), task.start, task.block_table, task.needs_logits)
            for task in tasks
        ]

        def before_layer(layer: int) -> None:
            if counter is not None:
                counter.wait_for_layer(layer)
            self._on_progress()

        self._controller.before_compute(read, written, counter=counter)
        try:
            return self._forward(slices, self._caches, before_layer)
        finally:
            self._controller.after_compute(read, written)

    def _slots(self, task: StepTask) -> tuple[list[int], list[int]]:
        """Slots the task reads, `[0, end)` in tokens, and those it writes, `[start, end)`."""
        end = task.start + len(task.token_ids)
        read = [int(slot) for slot in task.block_table[: -(-end // self._block_size)]]
        return read, read[task.start // self._block_size :]


def _sample_all(tasks: Sequence[StepTask], logits: Sequence[Logits | None], result: StepResult) -> None:
    """The position is that of the new token, so a retry draws the same one."""
    for task, row in zip(tasks, logits, strict=True):
        if row is None:
            continue
        try:
            result.tokens[task.request_id] = sample(row, task.sampling, task.start + len(task.token_ids))
        except ModelError as error:
            result.errors[task.request_id] = str(error)
