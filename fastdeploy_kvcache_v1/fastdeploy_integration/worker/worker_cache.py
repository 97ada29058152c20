"""WorkerCache: the cache tensors of a worker rank, their copies, and what each forward pass waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...attention.base import AttentionCacheBackend, CacheLayout
from ...contract.messages import CacheLevel, RankCopies, WorkerReport
from ...errors import CacheStateError, ConfigError, TransferError
from ...worker.cache_controller import CacheController
from ...worker.layer_done_counter import LayerDoneCounter
from ...worker.runtime import Runtime
from ...worker.slot_set import NO_SLOTS, SlotSet
from ..swap_space import compare
from ..transport import SwapInbox, take_running
from .passes import PassTracker, PrefillTimer
from .running_tables import RunningTables
from .storage import RankStorage

logger = logging.getLogger(__name__)

MAIN, DRAFT = "main", "draft"


class OffsetCounter:
    """A `LayerDoneCounter` for a draft model, whose layers are numbered from 0 again."""

    def __init__(self, counter: LayerDoneCounter, first_layer: int) -> None:
        self._counter = counter
        self._first_layer = first_layer

    def wait_for_layer(self, layer: int) -> None:
        self._counter.wait_for_layer(self._first_layer + layer)


class WorkerCache:
    """Controller over the cache tensors of one rank. Not thread-safe: the worker's event loop uses it.

    FastDeploy makes the tensors of main and draft model separately, in either order. The controller and the host tier
    are made, and `make_runtime` is called, once the last part is registered. `expected_block_bytes`: block size by
    which the engine sized the host tier. `keep_host_memory`: host memory stays allocated, without content, while
    tensors are dropped and made anew. `tell_copies` takes the results of copies once per step. `storage` moves blocks
    to and from the store; if it uses device blocks, there is a controller even without a host tier, and reports carry
    the progress of passes. `draft_tokens`: see `RunningTables`.
    """

    def __init__(
        self,
        *,
        num_host_blocks: int,
        block_size: int,
        make_runtime: Callable[[], Runtime],
        parts: Sequence[str] = (MAIN,),
        layer_timeout_s: float = 30.0,
        expected_block_bytes: int | None = None,
        keep_host_memory: bool = False,
        tell_copies: Callable[[WorkerReport], None] = lambda report: None,
        storage: RankStorage | None = None,
        draft_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_host_blocks = num_host_blocks
        self._make_runtime = make_runtime
        self._layer_timeout_s = layer_timeout_s
        self._parts = tuple(parts)
        self._expected_block_bytes = expected_block_bytes
        self._keep_host_memory = keep_host_memory
        self._tell_copies = tell_copies
        self._copies = RankCopies()
        self._storage = storage
        self._passes = PassTracker(clock) if storage is not None and storage.uses_device_tier else None
        self._timer = PrefillTimer() if num_host_blocks else None
        """Its times decide whether blocks are loaded from the host or computed."""
        self._registered: dict[str, tuple[CacheLayout, dict[str, Any], int]] = {}
        self._runtime: Runtime | None = None
        self._controller: CacheController | None = None
        self._idle: CacheController | None = None
        """A controller without tensors, kept for its host memory."""
        self._inbox = SwapInbox()
        self._tables = RunningTables(block_size, draft_tokens)
        self._counters: list[LayerDoneCounter] = []
        self._latest: LayerDoneCounter | None = None
        """Counter of the latest step. Slots of an earlier swap-in may have been evicted and reused since."""
        self._running: tuple[SlotSet, SlotSet] | None = None
        """Slots that the begun pass reads and writes."""
        self.current_counter: LayerDoneCounter | None = None
        """The counter that the running pass waits for layer by layer."""

    # ---- tensors

    def register(self, part: str, layout: CacheLayout, tensors: dict[str, Any], num_blocks: int) -> None:
        """Add the tensors of one model. Raises `ConfigError` if the layouts of main and draft model do not match."""
        if part in self._registered:
            self.unregister(part)
        self._registered[part] = (layout, tensors, num_blocks)
        is_needed = self._num_host_blocks or self._passes is not None
        if is_needed and all(each in self._registered for each in self._parts):
            self._build()

    def unregister(self, part: str) -> None:
        """Call before FastDeploy drops the tensors of one model. Waits for copies. The host tier loses its content."""
        self._registered.pop(part, None)
        self._counters.clear()
        self._latest = self.current_counter = self._running = None
        self._tables.clear()
        if self._controller is not None:
            if self._storage is not None:
                self._storage.let_go()
            self._controller.free(keep_host_memory=self._keep_host_memory)
            for passes in (self._passes, self._timer):
                if passes is not None:
                    passes.forget()
            self._controller, self._idle = None, self._controller

    def _build(self) -> None:
        parts = [self._registered[each] for each in self._parts]
        layout, _, num_blocks = parts[0]
        if any(each.roles != layout.roles for each, _, _ in parts):
            raise ConfigError(
                "the draft model's cache has another layout than the main model's: leave out --swap-space and storage, "
                "or the draft model"
            )
        if any(blocks < num_blocks for _, _, blocks in parts):
            raise ConfigError(
                "the draft model's cache has fewer blocks than the main model's: set num_gpu_block_expand_ratio to 1"
            )
        combined = CacheLayout(sum(each.num_layers for each, _, _ in parts), layout.roles)
        tensors = {name: tensor for _, part, _ in parts for name, tensor in part.items()}
        controller = self._controller_for(combined)
        controller.attach_kv_cache(tensors, num_blocks, self._num_host_blocks)
        self._controller, self._idle = controller, None
        if self._storage is not None:
            self._storage.use(controller)
        if not self._num_host_blocks:
            return
        logger.info("host tier: %d blocks of %d bytes", self._num_host_blocks, combined.block_bytes)
        compare(combined.block_bytes, self._expected_block_bytes, self._num_host_blocks)

    def _controller_for(self, layout: CacheLayout) -> CacheController:
        """The idle controller with its host memory if the layout is the same, else a new one."""
        if self._idle is not None and self._idle.layout == layout:
            return self._idle
        if self._idle is not None:
            self._idle.free()
            self._idle = None
        if self._runtime is None:
            self._runtime = self._make_runtime()
        return CacheController(
            AttentionCacheBackend(layout),  # FastDeploy's attention backends have made the tensors
            runtime=self._runtime,
            layer_timeout_s=self._layer_timeout_s,
            host_trailer_bytes=0 if self._storage is None else self._storage.host_trailer_bytes,
            copies=self._copies,
        )

    @property
    def has_host_tier(self) -> bool:
        return self._controller is not None and bool(self._num_host_blocks)

    @property
    def num_main_layers(self) -> int:
        return self._registered[MAIN][0].num_layers

    # ---- a step

    def receive(self, tasks: Sequence[Any]) -> None:
        """Start the copies of a batch. Raises `TransferError` if an earlier batch was lost."""
        steps, running = self._inbox.take(tasks), take_running(tasks)
        self._tables.update(tasks)
        if running is not None:
            self._tables.hear(running)
        if self._timer is not None:
            self._timer.received(tasks)
        for step in steps:
            if self._controller is None and step:
                raise CacheStateError(f"swap step {step.step} arrived while there are no caches")
            self._latest = None
            if self._controller is not None:
                overwritten = self._tables.written() if step.swap_out else None
                self._latest = self._controller.transfers.submit(step, overwritten=overwritten)
                self._counters += [] if self._latest is None else [self._latest]
        if self._passes is not None and steps:
            self._passes.taken(steps[-1].step)

    def begin_forward(self, *, layer_by_layer: bool) -> LayerDoneCounter | None:
        """Call before a forward pass. Makes it wait for copies that read slots it writes, and for earlier swap-ins.

        Returns the counter that the pass must wait for layer by layer, or None.
        """
        if self._controller is None:
            return None
        writes = self._tables.written()
        reads = self._tables.read()
        if self._running is not None:  # a pass that was begun but never ended may have been submitted
            reads, writes = reads | self._running[0], writes | self._running[1]
        self._running = reads, writes
        layered = self._latest if layer_by_layer else None
        for counter in self._counters:
            if counter is not layered:
                counter.wait_all()
        waits: LayerDoneCounter | None = layered
        if self._controller.transfers.num_unreported:
            # A slot swapped in for this pass may still count as written by a row whose end is not known yet.
            late = writes if layered is None else writes - layered.target_slots
            waits = self._controller.transfers.before_compute(NO_SLOTS, late, counter=layered, by_layer=layer_by_layer)
        if self._timer is not None and self._runtime is not None:
            self._timer.begin(self._runtime.compute_stream, waits_inside=waits is not None)
        self.current_counter = waits
        return waits

    def end_forward(self, *, is_idle: bool = False) -> None:
        """Call after a step: later copies wait for its pass. `is_idle`: no row computes before the next batch.

        Raises `TransferError` if a copy to the device failed: a block without its content must never be read. A failed
        copy to the host tier only loses its blocks there. A copy back of such blocks fails, unless the engine learns of
        the failure first and asks for none.
        """
        if self._controller is None:
            return
        if self._running is not None:
            (reads, writes), self._running = self._running, None
            layered, self.current_counter = self.current_counter, None
            self._counters.clear()
            self._latest = None
            if layered is not None:  # a step without tokens, or without its draft model, has run no layer that waits
                layered.wait_all()
            if self._timer is not None and self._runtime is not None:
                self._timer.end(self._runtime.compute_stream)
            event = self._controller.transfers.after_compute(reads, writes)
            if not is_idle:
                self._tables.pass_submitted()
                if self._passes is not None:
                    self._passes.submitted(event)
        self._report(is_idle)

    def report_while_idle(self, *, is_idle: bool = True) -> None:
        """Report copies and passes while no pass is coming. `is_idle` and errors: see `end_forward`."""
        if self._controller is not None and (self._controller.transfers.num_unreported or self._passes is not None):
            self._report(is_idle)

    def _report(self, is_idle: bool) -> None:
        assert self._controller is not None
        report = self._controller.transfers.take_report()
        if self._passes is not None:
            report = replace(report, passes=self._passes.news(is_idle=is_idle))
        if self._timer is not None and (prefills := self._timer.take()):
            report = replace(report, prefills=prefills)
        self._tell_copies(report)
        failed = [each for each in report.transfers if not each.ok]
        for each in failed:
            logger.warning(
                "step %d: the copy of %d blocks to the %s tier failed: %s",
                each.step, each.num_blocks, each.target.value, each.error,
            )  # fmt: skip
        lost = [each for each in failed if each.target is CacheLevel.DEVICE]
        if lost:
            raise TransferError(f"{len(lost)} copies of KV blocks failed, the first one with: {lost[0].error}")
