"""LayerDoneCounter: lets the forward pass of one step wait for its swap-in layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..errors import CacheStateError, InvariantError, LayerSwapTimeoutError, TransferError
from .runtime import Event, Stream
from .runtime.base import describe
from .slot_set import SlotSet


class WaitMeter:
    """Seconds the computing thread stood still for copies, since the last report."""

    def __init__(self) -> None:
        self.seconds = 0.0


class LayerDoneCounter:
    """One event per layer of one swap-in, waited for on the compute stream. For the thread that computes.

    On a CPU a wait blocks. On a GPU it is a stream wait: it returns at once, timeouts do not apply, and only failures
    known at submission raise. A failure concerns the requests that read `target_slots`, nobody else.
    """

    def __init__(
        self,
        layer_events: Sequence[Event],
        compute_stream: Stream,
        target_slots: SlotSet,
        *,
        timeout_s: float,
        meter: WaitMeter,
        on_failure: Callable[[str], None],
    ) -> None:
        self.target_slots = target_slots
        """Device slots this swap-in fills."""
        self.exposed_wait_s = 0.0
        """Seconds the calling thread was blocked in this counter."""
        self._events = tuple(layer_events)
        self._compute = compute_stream
        self._timeout_s = timeout_s
        self._meter = meter
        self._on_failure = on_failure
        self._given_up: str | None = None

    @property
    def num_layers(self) -> int:
        return len(self._events)

    @property
    def num_layers_done(self) -> int:
        """Layers that have arrived (or failed) so far. Layers arrive in order."""
        return sum(event.done() for event in self._events)

    def wait_for_layer(self, layer: int, timeout: float | None = None) -> None:
        """Compute goes on when `layer` has arrived. May be called again. `timeout` in seconds, None: the default.

        Raises `LayerSwapTimeoutError` when it does not arrive in time, and ever after, because the swap-in is then
        reported as failed; `TransferError` when its copy failed.
        """
        if not 0 <= layer < len(self._events):
            raise CacheStateError(f"layer {layer} is not in [0, {len(self._events)})")
        if self._given_up is not None:
            raise LayerSwapTimeoutError(self._given_up)
        limit = self._timeout_s if timeout is None else timeout
        start = time.perf_counter()
        try:
            self._compute.wait_event(self._events[layer], needs_data=True, timeout=limit)
        except LayerSwapTimeoutError:
            self._given_up = f"the swap-in of layer {layer} did not arrive within {limit} s"
            self._on_failure(self._given_up)
            raise LayerSwapTimeoutError(self._given_up) from None
        except TransferError as error:
            # Reported from now on, though the rest of the unit may take a moment to be skipped.
            self._on_failure(describe(error.__cause__ or error))
            raise TransferError(f"the swap-in of layer {layer} failed: {error}") from error
        finally:
            waited = time.perf_counter() - start
            self.exposed_wait_s += waited
            self._meter.seconds += waited

    def wait_all(self, timeout: float | None = None) -> None:
        """As `wait_for_layer` for every layer, within one `timeout`. The stream is FIFO: the last stands for all."""
        self.wait_for_layer(len(self._events) - 1, timeout)

    def check(self) -> None:
        """Raises `InvariantError`. Layers finish in order, and a failed layer fails all after it."""
        # Snapshot from the back, so that a layer finishing meanwhile cannot look out of order.
        done = [event.done() for event in reversed(self._events)][::-1]
        if sorted(done, reverse=True) != done:
            raise InvariantError(f"layers finished out of order: {done}")
        failed = [event.error is not None for event, is_done in zip(self._events, done, strict=True) if is_done]
        if sorted(failed) != failed:
            raise InvariantError(f"a layer after a failed one arrived: {failed}")
