"""CacheTransferManager: runs the copies of each step on two streams, in an order the hazard tables dictate."""

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
    """The copies of one kind in one step: what was asked, the events that tell how it goes, the one result it gets."""

    def __init__(self, step: int, copies: BlockCopies, spans: ops.CopySpans, num_bytes: int) -> None:
        self.step = step
        self.copies = copies
        self.spans = spans
        self.num_bytes = num_bytes
        self.started: Event
        self.finished: Event
        """Both from its submission on."""
        self.layer_events: list[Event] = []
        """One per layer, where it is copied layer by layer; else none."""
        self.given_up: str | None = None
        """Why it was declared failed while still running."""
        self.is_reported = False

    def take_result(self) -> CopyResult | None:
        """Once, when it is known: it has ended or was given up."""
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
    """H2D layer by layer on the input stream; D2H on the output stream, of all layers at once or, where something waits
    to write what is read, layer by layer. Each is independent of the other and of compute but for the waits that the
    hazard tables ask for.

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
        """Those that are not reported, and those that were reported as given up and are still running."""
        self._refilled: deque[tuple[CacheLevel, Sequence[int]]] = deque()
        """Device slots that were filled from outside since the tables were last asked."""
        self._waited_s = runtime.compute_stream.waited_s
        self._last_step = -1
        self._filled = self.after_compute(NO_SLOTS, SlotSet(range(self._device_hazards.num_slots)))
        """End of the fill of the tensors, which the compute stream may still be at: a write of every device slot."""

    # ---- copies

    def submit(self, step: SwapStep, *, overwritten: SlotSet | None = None) -> LayerDoneCounter | None:
        """Start the copies of `step`, in its order where their slots meet. `overwritten`: device slots that are written
        soon after. A swap-out of one of them, or of one that the step's swap-in fills, goes layer by layer then, and
        the write can follow it so. With None swap-outs take the fastest way.

        Never blocks. Returns the counter of the transfer that fills the device layer by layer, None when there is none.
        Raises `CacheStateError`, nothing started, for foreign slots, a target written twice, tiers that no copy
        connects (`UnsupportedCopyError`), or a step that is not later than the last one.
        """
        if step.step <= self._last_step:
            raise CacheStateError(f"swap step {step.step} came after step {self._last_step}")
        planned = [self._plan(step.step, copies) for copies in step.transfers]
        self._last_step = step.step
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
        """All layers in one call; or a call and an event for each, so that what waits for a layer goes on with it."""
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
        """Waits for swap-outs to read what is overwritten: per-layer events where there are some. And all others."""
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
        """Compute will read and write these device slots: it waits for copies that read what it writes, and for
        copies that write what it touches.

        The swap-in behind `counter` is left out: the forward pass waits for it layer by layer. Every other unfinished
        swap-in is waited for here, so one whose counter was dropped is safe. A slot that is read and written counts as
        written: its old content is not required to be valid.

        With `by_layer` swap-outs that go layer by layer are left out, too. Returns what the forward pass has to wait
        for itself: `counter`, or one for those swap-outs alone.

        Raises `TransferError` when the copy that should have filled a read slot failed, `LayerSwapTimeoutError` when a
        copy takes longer than `layer_timeout_s` (CPU only); `failed_slots` then names the slots without content, and
        compute must not run with those. `CacheStateError` if the swap-in of `counter` fills a written slot.
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
        """Compute on these slots has been submitted: later copies that conflict wait for it. Returns the event of its
        end. Call it with what `before_compute` was told, also when the forward pass failed halfway.
        """
        event = self._runtime.compute_stream.record_event()
        self._device_hazards.after(Actor.COMPUTE, event, reads=reads, writes=writes)
        return event

    def failed_slots(self, slots: Iterable[int]) -> list[int]:
        """The device `slots` whose last copy failed or was given up."""
        self._take_refilled()
        return self._device_hazards.failed(slots)

    def refilled(self, slots: Sequence[int], level: CacheLevel = CacheLevel.DEVICE) -> None:
        """`slots` of tier `level` were filled from outside, and no copy writes to them any more: whatever failed there
        before is repaired. Any thread may say so, before the scheduler is told that the blocks are there.
        """
        self._refilled.append((level, slots))

    def _take_refilled(self) -> None:
        while self._refilled:
            level, slots = self._refilled.popleft()
            self._hazards[level].refilled(slots)

    @property
    def device_hazards(self) -> HazardTable:
        """Uses of device slots by who is no copy and no pass are asked and told here, on any thread."""
        return self._device_hazards

    @property
    def device_rows(self) -> tuple[LayerRows, ...]:
        """Per layer, per role: where each device block keeps its row."""
        return self._device_layers

    def late_writes(self, slots: Collection[int]) -> list[Event]:
        """What still writes to one of device `slots` and is in no report to come: copies that were given up, and the
        fill of new tensors. Any thread may ask; who uses slots without `device_hazards` waits for these.
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
        """Each transfer once, when it finished, failed or was given up; in submission order. Never blocks."""
        results = [result for transfer in self._transfers if (result := transfer.take_result()) is not None]
        self._transfers = [each for each in self._transfers if not (each.is_reported and each.finished.done())]
        return results

    def take_report(self) -> WorkerReport:
        """As `take_results`, how long compute stood still for copies since the last report, and how far copies are."""
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
        """Submitted transfers that `take_results` has not returned yet."""
        return sum(not transfer.is_reported for transfer in self._transfers)

    # ---- end

    def drain(self, timeout: float | None = None) -> None:
        """Block until no copy is running, given-up ones included. Raises `LayerSwapTimeoutError`; results stay."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for transfer in self._transfers:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not transfer.finished.wait_done(left):
                raise LayerSwapTimeoutError(f"the copies of step {transfer.step} were not done within {timeout} s")

    def close(self) -> None:
        """End the streams, and give up what the copies hold. Idempotent."""
        for stream in self._streams.values():
            stream.close()
        if self._copies is not None:
            self._copies.close()

    def check(self) -> None:
        """Raises `InvariantError`."""
        for hazards in self._hazards.values():
            hazards.check()
        # Reported ones are remembered only where they were given up.
        if any(transfer.is_reported and transfer.given_up is None for transfer in self._transfers):
            raise InvariantError("a transfer that ended is remembered after its report")
        # Steps are reported in order of submission.
        steps = [transfer.step for transfer in self._transfers]
        if steps != sorted(steps):
            raise InvariantError(f"transfers are out of step order: {steps}")
