"""CacheTransferManager: runs the copies of each step on two streams, ordered by the hazard tables."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from ..contract.messages import (
    SWAP_IN,
    SWAP_OUT,
    BlockCopies,
    CacheLevel,
    CopyResult,
    RankCopies,
    SwapStep,
    WorkerReport,
)
from ..errors import CacheStateError, InvariantError, LayerSwapTimeoutError, UnsupportedCopyError
from . import ops
from .hazards import Actor, Dependency, Hazard, HazardTable
from .host_pool import HostPool
from .layer_done_counter import LayerDoneCounter
from .ops import LayerRows
from .runtime import Event, Runtime, Stream
from .runtime.base import describe
from .slot_set import NO_SLOTS, SlotSet, slot_set

logger = logging.getLogger(__name__)


class Transfer:
    """The copies of one kind in one step, their events and their one result."""

    def __init__(self, step: int, copies: BlockCopies, spans: ops.CopySpans, num_bytes: int) -> None:
        self.step = step
        self.copies = copies
        self.spans = spans
        self.num_bytes = num_bytes
        self.started: Event
        self.finished: Event
        """Both from its submission on."""
        self.layer_events: list[Event] = []
        """One per layer if it is copied layer by layer, else none."""
        self.given_up: str | None = None
        """Reason why it was declared failed while still running."""
        self.is_reported = False

    def take_result(self) -> CopyResult | None:
        """Return the result once, after it has ended or was given up."""
        if self.is_reported or (self.given_up is None and not self.finished.done()):
            return None
        self.is_reported = True
        error = self.given_up
        if error is None and self.finished.error is not None:
            error = describe(self.finished.error)
        return CopyResult(
            step=self.step,
            source=self.copies.source,
            target=self.copies.target,
            num_blocks=len(self.copies),
            num_bytes=self.num_bytes,
            seconds=self.finished.seconds_since(self.started) if self.finished.done() else 0.0,
            target_slots=() if error is None else tuple(self.copies.target_slots),
            error=error,
        )


class CacheTransferManager:
    """Swap-ins run layer by layer on one stream. Swap-outs run on another one, all layers at once, or layer by layer if
    a write waits for them. Only the hazard tables order them against each other and compute.

    Never blocks the submitting thread. Not thread-safe: one thread submits, computes and takes results. Streams are
    made at the first copy, so a process may fork before.
    """

    def __init__(
        self,
        device_layers: Sequence[LayerRows],
        host: HostPool,
        runtime: Runtime,
        counted: RankCopies,
        *,
        layer_timeout_s: float,
    ) -> None:
        self._runtime = runtime
        self._counted = counted
        self._block_bytes = host.layout.block_bytes
        self._layer_timeout_s = layer_timeout_s
        self._device_hazards = HazardTable("device", device_layers[0][0].num_rows)
        self._hazards = {
            CacheLevel.DEVICE: self._device_hazards,
            CacheLevel.HOST: HazardTable("host", host.num_blocks),
        }
        self._device_layers = tuple(device_layers)
        self._copies = runtime.new_copies(device_layers, host.layers) if host.num_blocks else None
        counted.paths = runtime.copy_paths()
        self._totals = counted.snapshot()
        """As of the last report that had news."""
        self._streams: dict[Actor, Stream] = {}
        self._transfers: list[Transfer] = []
        """Not reported yet, or reported as given up and still running."""
        self._refilled: deque[Sequence[int]] = deque()
        """Device slots filled from outside since their table was last used."""
        self._waited_s = runtime.compute_stream.waited_s
        self._last_step = -1
        self._filled = self.after_compute(NO_SLOTS, SlotSet(range(self._device_hazards.num_slots)))
        """The compute stream may still fill new tensors: a write of every device slot."""

    # ---- copies

    def submit(self, step: SwapStep, *, overwritten: SlotSet | None = None) -> LayerDoneCounter | None:
        """Start the copies of `step`, ordered where their slots meet. Never blocks.

        `overwritten`: device slots that are written soon after. Swap-outs of these slots, or of slots that the step's
        swap-in fills, go layer by layer, so that the write can follow each layer. With None all swap-outs go at once,
        as delays a pass least. Returns the counter of the swap-in, None without one. Raises `CacheStateError`, with
        nothing started, for foreign slots, a target written twice, or a step that is not later than the last one;
        `UnsupportedCopyError` for tiers that no copy connects.
        """
        if step.step <= self._last_step:
            raise CacheStateError(f"swap step {step.step} came after step {self._last_step}")
        planned = [self._plan(step.step, copies) for copies in step.transfers]
        self._last_step = step.step
        if step.refilled:
            self._hazards[CacheLevel.HOST].refilled(step.refilled)
        counter: LayerDoneCounter | None = None
        soon = [transfer.spans.writes for transfer in planned if transfer.copies.kind == SWAP_IN]
        for transfer in planned:
            if transfer.copies.kind == SWAP_IN:
                self._copy(Actor.SWAP_IN, transfer, by_layer=True)
                counter = self._counter_of(transfer)
            else:
                by_layer = overwritten is not None and not transfer.spans.reads.isdisjoint(overwritten.union(*soon))
                self._copy(Actor.SWAP_OUT, transfer, by_layer=by_layer)
        return counter

    def _plan(self, step: int, copies: BlockCopies) -> Transfer:
        if copies.kind not in (SWAP_OUT, SWAP_IN):
            raise UnsupportedCopyError(copies.source.value, copies.target.value)
        spans = ops.plan_spans(
            copies.source_slots,
            copies.target_slots,
            num_sources=self._hazards[copies.source].num_slots,
            num_targets=self._hazards[copies.target].num_slots,
        )
        return Transfer(step, copies, spans, len(copies) * self._block_bytes)

    def _copy(self, actor: Actor, transfer: Transfer, *, by_layer: bool) -> None:
        """Copy all layers in one call, or each layer in a call with an event of its own."""
        assert self._copies is not None, "a copy of a tier without slots was planned"
        source, target = self._hazards[transfer.copies.source], self._hazards[transfer.copies.target]
        to_device = target is self._device_hazards
        self._take_refilled()
        stream = self._stream_of(actor)
        stream.begin()
        waits = source.before(actor, reads=transfer.spans.reads) + target.before(actor, writes=transfer.spans.writes)
        whole, readers = self._by_layer(waits) if by_layer else (waits, [])
        for wait in whole:
            stream.wait_event(wait.event, needs_data=wait.needs_data, timeout=self._layer_timeout_s)
        transfer.started = stream.record_event(timed=True)
        if by_layer:
            for layer in range(len(self._device_layers)):
                for reader in readers:
                    stream.wait_event(reader[layer])
                stream.submit(self._copies.layer, stream, layer, transfer.spans, to_device)
                transfer.layer_events.append(stream.record_event())
        else:
            stream.submit(self._copies.all_layers, stream, transfer.spans, to_device)
        transfer.finished = stream.record_event(timed=True)
        source.after(actor, transfer.finished, reads=transfer.spans.reads)
        target.after(actor, transfer.finished, writes=transfer.spans.writes)
        self._transfers.append(transfer)

    def _stream_of(self, actor: Actor) -> Stream:
        if actor not in self._streams:
            self._streams[actor] = self._runtime.new_stream(f"kv-{actor.value}")
        return self._streams[actor]

    def _counter_of(self, swap_in: Transfer) -> LayerDoneCounter:
        return LayerDoneCounter(
            len(self._device_layers),
            swap_in.layer_events,
            self._runtime.compute_stream,
            swap_in.spans.writes,
            timeout_s=self._layer_timeout_s,
            on_failure=partial(self._give_up, swap_in),
        )

    def _by_layer(self, waits: list[Dependency]) -> tuple[list[Dependency], list[list[Event]]]:
        """Split `waits` into whole ones, and the layer events of swap-outs whose slots are overwritten."""
        layered = {id(each.finished): each.layer_events for each in self._transfers if each.layer_events}
        overwrites = [each.hazard is Hazard.WRITE_AFTER_READ and id(each.event) in layered for each in waits]
        whole = [wait for wait, is_layered in zip(waits, overwrites, strict=True) if not is_layered]
        return whole, [layered[id(wait.event)] for wait, each in zip(waits, overwrites, strict=True) if each]

    # ---- compute

    def before_compute(
        self,
        reads: Iterable[int],
        writes: Iterable[int],
        *,
        counter: LayerDoneCounter | None = None,
        by_layer: bool = False,
    ) -> LayerDoneCounter | None:
        """Let compute wait until it may read and write these device slots.

        It waits for copies that read slots it writes, and that write slots it touches, except the swap-in of `counter`:
        the forward pass waits for that layer by layer. A slot that is read and written counts as written: its old
        content need not be valid. With `by_layer` it leaves layer-by-layer swap-outs to the pass as well. Returns the
        counter for the pass: `counter`, or a new one for those swap-outs.

        Raises `TransferError` if the copy into a read slot failed, `LayerSwapTimeoutError` if a copy takes longer than
        `layer_timeout_s` (CPU only). `failed_slots` then names the slots without content: compute must not run with
        them. Raises `CacheStateError` if the swap-in of `counter` fills a written slot.
        """
        writes = slot_set(writes)
        if counter is not None:
            skipped = counter.target_slots
            overlap = skipped & writes
            if overlap:
                raise CacheStateError(f"slots {list(overlap)} are written while they are being swapped in")
            reads = slot_set(reads) - skipped
        self._take_refilled()
        compute = self._runtime.compute_stream
        compute.begin()
        waits = self._device_hazards.before(Actor.COMPUTE, reads=reads, writes=writes)
        whole, swap_outs = self._by_layer(waits) if by_layer else (waits, [])
        for wait in whole:
            self._compute_waits(compute, wait)
        if counter is None and swap_outs:
            counter = LayerDoneCounter(len(self._device_layers), (), compute, timeout_s=self._layer_timeout_s)
        if counter is not None:
            counter.swap_outs = swap_outs
        return counter

    def _compute_waits(self, compute: Stream, wait: Dependency) -> None:
        try:
            compute.wait_event(wait.event, needs_data=wait.needs_data, timeout=self._layer_timeout_s)
        except LayerSwapTimeoutError as error:
            for transfer in self._transfers:
                if transfer.finished is wait.event and transfer.copies.target is CacheLevel.DEVICE:
                    self._give_up(transfer, str(error))
            raise

    def after_compute(self, reads: Iterable[int], writes: Iterable[int]) -> Event:
        """Record submitted compute: later conflicting copies wait for its event, which is returned.

        Call it with the slots of `before_compute`, also if the forward pass failed halfway.
        """
        event = self._runtime.compute_stream.record_event()
        self._device_hazards.after(Actor.COMPUTE, event, reads=reads, writes=writes)
        return event

    def failed_slots(self, slots: Iterable[int]) -> list[int]:
        """Return the device `slots` whose last copy failed or was given up."""
        self._take_refilled()
        return self._device_hazards.failed(slots)

    def refilled(self, slots: Sequence[int]) -> None:
        """Repair failed copies into device `slots`: they were filled from outside. Thread-safe.

        No copy may write to them any more, and the scheduler may not yet know that the blocks have arrived.
        """
        self._refilled.append(slots)

    def _take_refilled(self) -> None:
        while self._refilled:
            self._device_hazards.refilled(self._refilled.popleft())

    @property
    def device_hazards(self) -> HazardTable:
        """For uses of device slots other than copies and passes, on any thread."""
        return self._device_hazards

    @property
    def device_rows(self) -> tuple[LayerRows, ...]:
        """Rows of the device blocks per layer and role."""
        return self._device_layers

    def late_writes(self, slots: Collection[int]) -> list[Event]:
        """List events of writes to device `slots` that no later report names: copies that were given up, and the fill
        of new tensors. Uses of slots without `device_hazards` must wait for them. Thread-safe.
        """
        late = frozenset(slots)
        copies = [
            transfer.finished
            for transfer in list(self._transfers)
            if transfer.is_reported
            and transfer.copies.target is CacheLevel.DEVICE
            and not late.isdisjoint(transfer.copies.target_slots)
            and not transfer.finished.done()
        ]
        return copies if self._filled.done() else [self._filled, *copies]

    # ---- results

    def take_results(self) -> list[CopyResult]:
        """Return each transfer once it finished, failed or was given up, in submission order. Never blocks."""
        results = [result for transfer in self._transfers if (result := transfer.take_result()) is not None]
        self._transfers = [each for each in self._transfers if not (each.is_reported and each.finished.done())]
        return results

    def take_report(self) -> WorkerReport:
        """As `take_results`, with the wait of compute, the totals, and the last step whose copies have ended."""
        waited_s = self._runtime.compute_stream.waited_s
        waited, self._waited_s = waited_s - self._waited_s, waited_s
        results = tuple(self.take_results())
        if results or waited:
            self._counted.exposed_wait_total_s += waited
            for result in results:
                self._counted.add(result)
            self._counted.paths = self._runtime.copy_paths()  # a failed path may be unused from now on
            self._totals = self._counted.snapshot()
        oldest = min((transfer.step for transfer in self._transfers), default=self._last_step + 1)
        return WorkerReport(results, waited, oldest - 1, copies=self._totals)

    def _give_up(self, transfer: Transfer, reason: str) -> None:
        if transfer.given_up is None and not transfer.is_reported:
            logger.warning("swap-in of step %d given up: %s", transfer.step, reason)
            transfer.given_up = reason
            self._hazards[transfer.copies.target].fail(transfer.copies.target_slots, transfer.finished)

    @property
    def num_unreported(self) -> int:
        return sum(not transfer.is_reported for transfer in self._transfers)

    # ---- end

    def drain(self, timeout: float | None = None) -> None:
        """Block until no copy runs, given-up ones included. Raises `LayerSwapTimeoutError` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for transfer in self._transfers:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not transfer.finished.wait_done(left):
                raise LayerSwapTimeoutError(f"the copies of step {transfer.step} were not done within {timeout} s")

    def close(self) -> None:
        """End the streams and release the copies' memory. Idempotent."""
        for stream in self._streams.values():
            stream.close()
        if self._copies is not None:
            self._copies.close()

    def check(self) -> None:
        """Raises `InvariantError`."""
        for hazards in self._hazards.values():
            hazards.check()
        # A reported transfer stays only if it was given up.
        if any(transfer.is_reported and transfer.given_up is None for transfer in self._transfers):
            raise InvariantError("a transfer that ended is remembered after its report")
        # Transfers are in order of submission.
        steps = [transfer.step for transfer in self._transfers]
        if steps != sorted(steps):
            raise InvariantError(f"transfers are out of step order: {steps}")
