"""CpuModelRunner: the embedded engine's model over our caches, driven by FastDeploy."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...contract.messages import BatchRequest, PrefillTime, WorkerReport
from ...errors import ConfigError, ModelError
from ...fastdeploy_integration.disaggregation.ranks import RankRole, RankShape
from ...fastdeploy_integration.engine.weight_updates import CLEARED, NORMAL
from ...fastdeploy_integration.transport import SwapInbox
from ...fastdeploy_integration.worker.passes import PassTracker
from ...fastdeploy_integration.worker.storage import RankStorage
from ...worker.cache_controller import CacheController
from ...worker.hazards import Actor
from ...worker.runtime.cpu import CpuEvent
from ..model import load_model, load_model_config
from ..model.copy_faults import VARIABLE, make_runtime
from ..model.ranks import ONE_RANK, Ranks
from ..model.step import Logits, SequenceSlice, StepResult, StepTask
from ..model.step_runner import Model, StepRunner
from .batch_rows import BatchRows, RunningSequence
from .tasks import apply_task
from .token_channel import TokenSender

logger = logging.getLogger(__name__)

MAX_RETRIES = 3
"""Times that a sequence is computed again after failed copies, before its request fails."""

IDLE_SLEEP_S = 0.001


def stats_file(log_directory: Path, rank: int) -> Path:
    """File with the totals of a rank's copies."""
    return log_directory / f"cpu_worker{rank or ''}.json"


@dataclass(frozen=True)
class RunnerConfig:
    model_path: Path
    block_size: int
    num_host_blocks: int
    cache_dtype: str
    keep_host_memory: bool = False
    """While the caches are dropped."""


class CpuModelRunner:
    """One rank. Not thread-safe: for the worker's event loop. FastDeploy uses `not_need_stop`, `is_sleeping` and
    `device_id`.
    """

    device_id = 0

    def __init__(
        self,
        config: RunnerConfig,
        sender: TokenSender | None,
        *,
        stats_file: Path,
        tell_weights_status: Callable[[int, int], None] = lambda port, status: None,
        tell_copies: Callable[[WorkerReport], None] = lambda report: None,
        storage: RankStorage | None = None,
        ranks: Ranks = ONE_RANK,
        transfers: RankRole | None = None,
    ) -> None:
        """`sender`: of the one rank that sends tokens to FastDeploy. `transfers`: of a server with a role."""
        self._config = config
        self._ranks = ranks
        self._tell_weights_status = tell_weights_status
        self._tell_copies = tell_copies
        self._storage = storage
        self._transfers = transfers
        self._last_step = -1
        """Last step whose copies were submitted."""
        self._model = load_model_config(config.model_path)
        self._sender = sender
        self._stats_file = stats_file
        self._table = BatchRows(config.block_size)
        self._passes = PassTracker() if storage is not None and storage.uses_device_tier else None
        self._inbox = SwapInbox()
        self._pending = BatchRequest()
        self._computing: Model | None = None
        self._steps: StepRunner | None = None
        self._num_device_blocks = 0
        self._num_steps = 0
        self._controller = CacheController(
            self._model.shard(ranks.size).cache_backend(block_size=config.block_size, dtype=config.cache_dtype),
            runtime=make_runtime(os.environ.get(VARIABLE, ""), ranks.rank),
            rank=ranks.rank,
            device=ranks.rank,
            host_trailer_bytes=0 if storage is None else storage.host_trailer_bytes,
        )

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Weights or caches are dropped."""
        return self._computing is None or self._steps is None

    @property
    def block_bytes(self) -> int:
        return self._controller.layout.block_bytes

    def load_weights(self) -> None:
        """Read the weights, which may have changed, from the directory."""
        layout = self._controller.layout
        self._computing = load_model(self._config.model_path, self._model, layout, self._ranks)

    def drop_weights(self) -> None:
        self._computing = None

    def create_caches(self, num_device_blocks: int | None = None) -> None:
        """Make both tiers, empty; by default with as many device blocks as before."""
        self._num_device_blocks = num_device_blocks or self._num_device_blocks
        caches = self._controller.initialize_kv_cache(self._num_device_blocks, self._config.num_host_blocks)
        self._steps = StepRunner(
            self._forward, self._controller, caches, block_size=self._config.block_size, ranks=self._ranks
        )
        if self._storage is not None:
            self._storage.use(self._controller)
        if self._transfers is not None:
            heads = None if self._model.ranks_cache_alike else self._model.num_kv_heads
            shape = RankShape(self._config.block_size, heads, self._ranks.size, self._ranks.rank)
            try:
                self._transfers.use(self._controller, shape)
            except ConfigError:
                self.drop_caches()  # so that the next wakeup can succeed
                raise

    def drop_caches(self) -> None:
        """Free the caches and forget every sequence."""
        self.clear_requests()
        if self._transfers is not None:
            self._transfers.let_go()
        if self._storage is not None:
            self._storage.let_go()
        self._controller.free(keep_host_memory=self._config.keep_host_memory)
        self._steps = None

    # FastDeploy's weight updates through shared memory. As in its GPU worker, the status is set before FastDeploy drops
    # this worker's queue, and when weights are cleared before the caches are.

    def clear_requests(self) -> None:
        """Forget every sequence, without a message to FastDeploy's scheduler."""
        self._table.clear()
        self._pending = BatchRequest()

    def clear_parameters(self, port: int) -> None:
        self.drop_weights()
        self._tell_weights_status(port, CLEARED)
        self.drop_caches()

    def update_parameters(self, port: int) -> None:
        self.restore(weights=True, caches=True)
        self._tell_weights_status(port, NORMAL)

    def restore(self, *, weights: bool, caches: bool) -> None:
        """Undo `drop_weights` and `drop_caches`, if they were dropped."""
        if weights and self._computing is None:
            self.load_weights()
        if caches and self._steps is None:
            self.create_caches()

    def _forward(
        self, sequences: Sequence[SequenceSlice], caches: Sequence[Any], before_layer: Callable[[int], None]
    ) -> list[Logits]:
        def begin_layer(layer: int) -> None:
            before_layer(layer)
            if self._transfers is not None:
                self._transfers.layer_begins(layer)

        assert self._computing is not None, "nothing is computed without weights"
        return self._computing.forward(sequences, caches, begin_layer)

    # -- steps ---------------------------------------------------------------------------------------------------

    def insert_tasks(self, tasks: Sequence[Any]) -> None:
        """Take over a batch. Raises `CacheStateError` for an impossible task and `TransferError` after lost swap steps;
        both end the worker, whose caches cannot be trusted any more.
        """
        steps = self._inbox.take(tasks)
        self._pending.swap_steps += steps
        if self._passes is not None and steps:
            self._passes.taken(steps[-1].step)
        if self._transfers is not None:
            self._transfers.insert(tasks)
        for task in tasks:
            started = apply_task(self._table, task)
            if started is not None and started.failed:
                self._spoil(started)

    def not_need_stop(self) -> bool:
        """True if there is work (FastDeploy's name), on all ranks or on none.

        FastDeploy's ranks meet at one barrier with work and at another without, but copies end at different times.
        """
        self._turn_transfers()
        copies_open = self._steps is not None and self._steps.has_open_copies
        is_busy = self._table.has_work or bool(self._pending) or copies_open
        is_busy = bool(self._ranks.union([self._ranks.rank] if is_busy else ()))
        if not is_busy and not self.is_sleeping:
            self._tell(WorkerReport(copies=self._controller.copies))
        return is_busy

    def _turn_transfers(self) -> None:
        if self._transfers is not None and self._steps is not None:
            self._transfers.turn(self._last_step)

    def _tell(self, report: WorkerReport) -> None:
        """Report copies and passes. A row that waits for blocks is idle until a batch brings them."""
        if self._passes is not None:
            is_idle = not (self._table.has_work or self._pending)
            report = replace(report, passes=self._passes.news(is_idle=is_idle))
        self._tell_copies(report)

    def execute(self, num_rows: int) -> None:
        """One step. Sends one message, unless no row had work."""
        if self.is_sleeping:
            time.sleep(IDLE_SLEEP_S)
            return
        assert self._steps is not None
        self._turn_transfers()
        had_work = self._table.has_work
        runnable = self._table.runnable()
        batch, self._pending = self._pending, BatchRequest()
        batch.requests = [self._step_task(sequence) for sequence in runnable.values()]
        if self._transfers is not None:
            self._transfers.begin_pass([(each.request_id, each.target) for each in runnable.values()])
        began = time.perf_counter()
        result = self._steps.run(batch)
        seconds = time.perf_counter() - began
        if batch.swap_steps:
            self._last_step = batch.swap_steps[-1].step
        if self._transfers is not None:
            self._tell_computed([each.request_id for each in runnable.values()], result)
        self._num_steps += 1
        if self._passes is not None:
            self._passes.submitted()
        prompts = [(each.computed, each.target) for each in runnable.values() if each.target - each.computed > 1]
        # This rank's waits for its own copies are known, but not its waits for another rank's copies.
        is_timed = self._ranks.size == 1 or not any(step.swap_in for step in batch.swap_steps)
        if prompts and is_timed and not (result.retry or result.errors):
            prefill = PrefillTime.of(prompts, seconds - result.report.exposed_wait_since_last_s)
            self._tell(replace(result.report, prefills=(prefill,)))
        else:
            self._tell(result.report)
        if result.report.transfers:
            self._write_stats()
        if not had_work:
            time.sleep(IDLE_SLEEP_S)
            return
        row_of = {sequence.request_id: row for row, sequence in runnable.items()}
        ended = {row_of[name]: None for name in result.errors}
        for name in result.retry:
            if not self._retry(runnable[row_of[name]], result.retry[name]):
                ended[row_of[name]] = None
        skipped = {*ended, *(row_of[name] for name in result.retry)}
        computed = {row: sequence for row, sequence in runnable.items() if row not in skipped}
        sampled = {row_of[name]: token for name, (token,) in result.tokens.items()}
        message = self._table.end_step(num_rows, computed, sampled)
        for row in ended:
            self._spoil(runnable[row])
            message[row] = self._table.fail(row)
        if self._transfers is not None and self._transfers.drops_rows_after_first_token:
            self._table.drop_started()
        if self._sender is not None:
            self._sender.send(message, running=bool(self._table.sequences))

    def _tell_computed(self, request_ids: Sequence[str], result: StepResult) -> None:
        assert self._transfers is not None
        lost = {**result.errors, **result.retry}
        for request_id, reason in lost.items():  # peers may know of its layers, which are computed again or never
            self._transfers.failed(request_id, reason)
        self._transfers.end_pass([each for each in request_ids if each not in lost])

    def _step_task(self, sequence: RunningSequence) -> StepTask:
        banned = () if sequence.may_end else sequence.rules.end_tokens
        return StepTask(
            request_id=sequence.request_id,
            token_ids=sequence.tokens[sequence.computed : sequence.target],
            start=sequence.computed,
            block_table=sequence.block_table,  # type: ignore[arg-type]  # plain integers from FastDeploy
            needs_logits=sequence.samples,
            sampling=replace(sequence.sampling, banned_tokens=banned),
        )

    def _retry(self, sequence: RunningSequence, reason: str) -> bool:
        """Compute the sequence again from the first block whose copy failed, for peers may read earlier blocks under
        leases. False after too many retries.
        """
        sequence.num_retries += 1
        if sequence.num_retries > MAX_RETRIES:
            logger.error("request %s fails after %d retries: %s", sequence.request_id, MAX_RETRIES, reason)
            return False
        lost = self._ranks.union(self._controller.transfers.failed_slots(sequence.block_table))
        first = next((index for index, slot in enumerate(sequence.block_table) if slot in lost), 0)
        sequence.computed = min(sequence.computed, first * self._config.block_size)
        logger.warning("request %s is computed again from token %d: %s", sequence.request_id, sequence.computed, reason)
        return True

    def _spoil(self, sequence: RunningSequence) -> None:
        """Mark the sequence's blocks as failed copies until they are computed.

        The engine counts them as cached since it sent the batch, and other requests may have them.
        """
        size = self._config.block_size
        slots = sequence.block_table[sequence.computed // size : sequence.target // size]  # whole ones are cached
        never_computed = CpuEvent()
        never_computed.finish(ModelError(f"request {sequence.request_id} failed before this block was computed"))
        self._controller.transfers.device_hazards.after(Actor.REMOTE, never_computed, writes=slots)

    def _write_stats(self) -> None:
        """For tests that watch the server. Replaces the file atomically."""
        content = {"steps": self._num_steps, **asdict(self._controller.copies)}
        temporary = self._stats_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self._stats_file)
