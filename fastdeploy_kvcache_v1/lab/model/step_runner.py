"""A step in the worker: copies, forward pass, sampling. Keeps no request between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from ...contract.messages import BatchRequest, WorkerReport
from ...errors import ModelError, RankGroupError, TransferError
from ...worker.cache_controller import CacheController
from ...worker.layer_done_counter import LayerDoneCounter
from .ranks import ONE_RANK, PeerError, PeerTransferError, Ranks
from .sampler import sample
from .step import Logits, SequenceSlice, StepResult, StepTask
from .vision import place_images

logger = logging.getLogger(__name__)


class Guess(Protocol):
    """The draft layer of a model: the last one in its caches, behind those of `forward`."""

    def __call__(
        self,
        sequences: Sequence[SequenceSlice],
        chosen: Sequence[int | None],
        caches: Sequence[Any],
        before_layer: Callable[[int], None],
    ) -> list[int | None]:
        """Write the draft layer's rows of slices after `forward`, and guess the token after the one `chosen` for each,
        None where none was. Otherwise like `Model.forward`.
        """


class Model(Protocol):
    """The computation. Calls do not overlap, and only the caches outlive them.

    `caches` are the tensors of the model's layout, layer by layer, roles in role order. `before_layer(l)` is called
    once per layer, in order, after the new rows of layer `l` are written and before its caches are read. It may wait
    for copies into other slots. Its exception ends the call, which may be repeated. A call writes exactly the slots of
    its tokens, and reads only slots of positions up to them.
    """

    def forward(
        self, sequences: Sequence[SequenceSlice], caches: Sequence[Any], before_layer: Callable[[int], None]
    ) -> list[Logits]:
        """Compute the slices: `num_logits` rows for each. Raises `ValueError` for slices that do not fit the model,
        their block tables or the caches; with several ranks also like `Ranks.exchange`.
        """

    @property
    def guess(self) -> Guess | None:
        """None without a draft layer."""


class Transfers(Protocol):
    """The part of `RankTransfers` that a pass uses."""

    def handle(self, commands: Iterable[Any], *, step: int | None = None) -> None: ...

    def begin_pass(self, ends: Iterable[tuple[str, int]]) -> None: ...

    def layer_begins(self, layer: int) -> None: ...

    def end_pass(self, computed: Collection[str]) -> None: ...


class StepRunner:
    """Runs batches against one set of caches. Single-threaded.

    A copy that fails or is late affects only the requests whose blocks it fills. They are dropped from the step and
    reported for a retry, and the others are recomputed without them. All `ranks` drop the same requests, before any
    rank reports a token.
    """

    def __init__(
        self,
        forward: Callable[..., list[Logits]],
        controller: CacheController,
        caches: list[Any],
        *,
        block_size: int,
        guess: Guess | None = None,
        transfers: Transfers | None = None,
        ranks: Ranks = ONE_RANK,
        layer_computed: Callable[[], None] = lambda: None,
    ) -> None:
        """`forward` and `guess` of a `Model`; `transfers` of a server with a role. All `ranks` run the same batches,
        each with its own part of the model. `layer_computed` is called as often as `before_layer`.
        """
        self._forward = forward
        self._guess = guess
        self._controller = controller
        self._caches = caches
        self._block_size = block_size
        self._transfers = transfers
        self._ranks = ranks
        self._layer_computed = layer_computed

    @property
    def has_open_copies(self) -> bool:
        """A submitted copy is not reported yet."""
        return self._controller.transfers.num_unreported > 0

    def run(self, batch: BatchRequest) -> StepResult:
        """Raises only when the batch's copies cannot be submitted, which leaves the caches unusable, and
        `RankGroupError` when the ranks cannot go on together.
        """
        counter: LayerDoneCounter | None = None
        for step in batch.swap_steps:
            counter = self._controller.transfers.submit(step)
        # After the copies: slots for blocks from outside may still be copied out.
        if self._transfers is not None:
            self._transfers.handle(batch.transfers, step=batch.swap_steps[-1].step if batch.swap_steps else None)
        result = self._compute(list(batch.requests), counter)
        if self._transfers is not None:
            dropped = result.retry.keys() | result.errors.keys()
            self._transfers.end_pass([each.request_id for each in batch.requests if each.request_id not in dropped])
        return replace(result, report=self.take_report())

    def take_report(self) -> WorkerReport:
        """Copies that ended since the last report."""
        return self._controller.transfers.take_report()

    def _compute(self, tasks: list[StepTask], counter: LayerDoneCounter | None) -> StepResult:
        """Forward pass and sampling."""
        retry: dict[str, str] = {}
        while tasks:
            try:
                return replace(self._run_on_all_ranks(tasks, counter), retry=retry)
            except RankGroupError:
                raise
            except TransferError as error:
                dropped = self._affected(tasks, counter)
                logger.warning("dropped %d of %d requests from the step: %s", len(dropped), len(tasks), error)
                retry.update({task.request_id: str(error) for task in dropped})
                tasks = [task for task in tasks if task.request_id not in retry]
                counter = None  # no remaining task reads what it was waiting for
            except Exception as error:  # the edge of a unit of work: these requests fail, the worker lives on
                logger.exception("the forward pass of %d requests failed", len(tasks))
                errors = {task.request_id: f"internal error: {error!r}" for task in tasks}
                return StepResult(errors=errors, retry=retry)
        return StepResult(retry=retry)

    def _affected(self, tasks: list[StepTask], counter: LayerDoneCounter | None) -> list[StepTask]:
        """Tasks that read a slot whose content did not arrive."""
        lost = set() if counter is None else set(counter.target_slots)
        lost.update(self._controller.transfers.failed_slots({slot for task in tasks for slot in self._slots(task)[0]}))
        lost = self._ranks.union(lost)
        affected = [task for task in tasks if not lost.isdisjoint(self._slots(task)[0])]
        # None at all: without a counter to leave out, the same pass would fail the same way again.
        return affected if affected or counter is not None else tasks

    def _run_on_all_ranks(self, tasks: Sequence[StepTask], counter: LayerDoneCounter | None) -> StepResult:
        """Like `_run_forward`, on all ranks or on none."""
        try:
            result = self._run_forward(tasks, counter)
        except (PeerTransferError, PeerError, RankGroupError):
            raise
        except Exception as error:  # any exception: the other ranks must not wait for this one
            self._ranks.fail(error)
        self._ranks.agree(repr((result.tokens, result.drafts, result.errors)).encode())
        return result

    def _run_forward(self, tasks: Sequence[StepTask], counter: LayerDoneCounter | None) -> StepResult:
        slots = [self._slots(task) for task in tasks]
        read = sorted({slot for readable, _ in slots for slot in readable})
        written = sorted({slot for _, writable in slots for slot in writable})
        result = StepResult()

        def before_layer(layer: int) -> None:
            self._layer_computed()
            if self._transfers is not None:
                self._transfers.layer_begins(layer)
            if counter is not None:
                counter.wait_for_layer(layer)

        if self._transfers is not None:
            self._transfers.begin_pass([(task.request_id, task.start + len(task.token_ids)) for task in tasks])
        self._controller.transfers.before_compute(read, written, counter=counter)
        try:
            slices = [self._slice(task) for task in tasks]
            for task, rows in zip(tasks, self._forward(slices, self._caches, before_layer), strict=True):
                if len(rows):
                    _sample(task, rows, result)
            if self._guess is not None:
                self._guess_next(self._guess, tasks, slices, result, before_layer)
            return result
        finally:
            self._controller.transfers.after_compute(read, written)

    def _guess_next(
        self,
        guess: Guess,
        tasks: Sequence[StepTask],
        slices: Sequence[SequenceSlice],
        result: StepResult,
        before_layer: Callable[[int], None],
    ) -> None:
        """Guess behind the positions without wrong guesses, into `result.drafts`."""
        known, chosen = [], []
        for task, each in zip(tasks, slices, strict=True):
            *accepted, token = result.tokens.get(task.request_id, (None,))
            kept = each.token_ids[: len(task.token_ids) + len(accepted)]
            known.append(replace(each, token_ids=kept, num_drafts=0))
            chosen.append(token)
        for task, draft in zip(tasks, guess(known, chosen, self._caches, before_layer), strict=True):
            if draft is not None:
                result.drafts[task.request_id] = (draft,)

    def _slice(self, task: StepTask) -> SequenceSlice:
        tokens = np.array([*task.token_ids, *task.drafts], dtype=np.int64)
        place_images(task.images, tokens, task.start)
        return SequenceSlice(tokens, task.start, task.block_table, task.needs_logits, len(task.drafts))

    def _slots(self, task: StepTask) -> tuple[list[int], list[int]]:
        """Slots the task reads, `[0, end)` in tokens, and those it writes, `[start, end)`."""
        end = task.start + len(task.token_ids) + len(task.drafts)
        read = [int(slot) for slot in task.block_table[: -(-end // self._block_size)]]
        return read, read[task.start // self._block_size :]


def _sample(task: StepTask, logits: Logits, result: StepResult) -> None:
    """Put the task's tokens, or an error, into `result`: one from the first of `logits`, and one from each later row
    whose draft was right. A retry draws the same tokens, because the new token's position keys them.
    """
    tokens: list[int] = []
    position = task.start + len(task.token_ids)
    try:
        for row, draft in zip_longest(logits, task.drafts):
            tokens.append(sample(row, task.sampling, position + len(tokens)))
            if tokens[-1] != draft:
                break
    except ModelError as error:
        if not tokens:  # else the next step fails alike
            result.errors[task.request_id] = str(error)
    if tokens:
        result.tokens[task.request_id] = tuple(tokens)
