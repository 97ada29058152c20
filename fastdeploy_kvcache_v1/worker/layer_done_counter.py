"""LayerDoneCounter (FastDeploy's name): the waits of a forward pass, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import CacheStateError, InvariantError, LayerSwapTimeoutError, TransferError
from .runtime import Event, Stream
from .runtime.base import describe
from .slot_set import NO_SLOTS, SlotSet


class LayerDoneCounter:
    """Waits for the swap-in that a pass reads and for swap-outs of slots that it overwrites, one event per layer each.
    For the thread that computes.

    On a CPU a wait blocks. On a GPU it is a stream wait: it returns at once, timeouts do not apply, and only failures
    known at submission raise. A failure concerns only the requests that read `target_slots`.
    """

    def __init__(
        self,
        num_layers: int,
        swap_in: Sequence[Event],
        compute_stream: Stream,
        target_slots: SlotSet = NO_SLOTS,
        *,
        timeout_s: float,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.num_layers = num_layers
        self.target_slots = target_slots
        """Device slots that the swap-in fills."""
        self.swap_outs: Sequence[Sequence[Event]] = ()
        """Layer events of swap-outs out of slots that the pass writes."""
        self._swap_in = tuple(swap_in)
        self._compute = compute_stream
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._given_up: str | None = None

    def wait_for_layer(self, layer: int, timeout: float | None = None) -> None:
        """Wait until compute may read and write `layer`; `timeout` in seconds (None: the default). Repeatable.

        Raises `LayerSwapTimeoutError` if a copy takes longer, and again on every later call for the swap-in, which is
        then reported as failed. Raises `TransferError` if the layer's copy failed.
        """
        if not 0 <= layer < self.num_layers:
            raise CacheStateError(f"layer {layer} is not in [0, {self.num_layers})")
        limit = self._timeout_s if timeout is None else timeout
        for layer_events in self.swap_outs:
            self._compute.wait_event(layer_events[layer], timeout=limit)
        if self._swap_in:
            self._wait_for_swap_in(layer, limit)

    def _wait_for_swap_in(self, layer: int, limit: float) -> None:
        if self._given_up is not None:
            raise LayerSwapTimeoutError(self._given_up)
        try:
            self._compute.wait_event(self._swap_in[layer], needs_data=True, timeout=limit)
        except LayerSwapTimeoutError:
            self._given_up = f"the swap-in of layer {layer} did not arrive within {limit} s"
            self._on_failure(self._given_up)
            raise LayerSwapTimeoutError(self._given_up) from None
        except TransferError as error:
            # Report it now, though the rest of the unit is still being skipped.
            self._on_failure(describe(error.__cause__ or error))
            raise TransferError(f"the swap-in of layer {layer} failed: {error}") from error

    def wait_all(self, timeout: float | None = None) -> None:
        """As `wait_for_layer` for all layers: streams are FIFO, so the last layer stands for all."""
        self.wait_for_layer(self.num_layers - 1, timeout)

    def check(self) -> None:
        """Raises `InvariantError`. Layers finish in order, and a failed layer fails all after it."""
        # From the back, so that a layer that finishes meanwhile cannot look out of order.
        done = [event.done() for event in reversed(self._swap_in)][::-1]
        if sorted(done, reverse=True) != done:
            raise InvariantError(f"layers finished out of order: {done}")
        failed = [event.error is not None for event, is_done in zip(self._swap_in, done, strict=True) if is_done]
        if sorted(failed) != failed:
            raise InvariantError(f"a layer after a failed one arrived: {failed}")
