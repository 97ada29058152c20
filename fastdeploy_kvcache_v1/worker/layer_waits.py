"""LayerWaits: what one forward pass waits for layer by layer, besides or without a swap-in of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .layer_done_counter import LayerDoneCounter, WaitMeter
from .runtime import Event, Stream
from .slot_set import SlotSet


class LayerWaits:
    """Copies out of slots that the pass overwrites, one event per layer each, and the swap-in that it reads.

    The pass writes a layer after the copies have read that layer. For the thread that computes; raises as
    `LayerDoneCounter`, and `LayerSwapTimeoutError` when a copy out of a slot takes longer than `timeout_s` (CPU only).
    """

    def __init__(
        self,
        counter: LayerDoneCounter | None,
        evictions: Sequence[Sequence[Event]],
        compute_stream: Stream,
        *,
        timeout_s: float,
        meter: WaitMeter,
    ) -> None:
        self._counter = counter
        self._evictions = tuple(evictions)
        self._compute = compute_stream
        self._timeout_s = timeout_s
        self._meter = meter

    @property
    def num_layers(self) -> int:
        return len(self._evictions[0])

    @property
    def target_slots(self) -> SlotSet:
        """Device slots that the swap-in fills."""
        return SlotSet() if self._counter is None else self._counter.target_slots

    def wait_for_layer(self, layer: int) -> None:
        """Compute goes on when it may read and write `layer`. May be called again."""
        start = time.perf_counter()
        try:
            for layer_events in self._evictions:
                self._compute.wait_event(layer_events[layer], timeout=self._timeout_s)
        finally:
            self._meter.seconds += time.perf_counter() - start
        if self._counter is not None:
            self._counter.wait_for_layer(layer)

    def wait_all(self) -> None:
        """As `wait_for_layer` for every layer. Streams are FIFO: the last stands for all."""
        self.wait_for_layer(self.num_layers - 1)
