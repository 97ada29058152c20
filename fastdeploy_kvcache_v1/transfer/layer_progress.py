"""LayerProgress: what a running forward pass has made readable, told to decode ranks in groups of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["GROUP_BYTES", "LayerProgress"]

GROUP_BYTES = 1 << 20
"""Layers are told together until they have so many bytes: a message costs as much as some 100 KiB of blocks."""


@dataclass(eq=False, slots=True)
class _Told:
    """How far one lease is. Blocks before `first_block` were told in all layers."""

    first_block: int = 0
    end_block: int = 0
    end_layer: int = 0


class LayerProgress:
    """Owned by the thread that computes. `tell(lease, end_block, end_layer)`: see `OfferDesk.progress`.

    A pass is `begin`, `reached` before each of its layers, and `finish` for the leases whose computation went well. A
    pass that is computed again, because others of its batch were dropped, tells nothing twice.
    """

    def __init__(
        self,
        tell: Callable[[str, int, int], None],
        *,
        num_layers: int,
        layer_bytes: int,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        """`layer_bytes`: of one block in one layer, on this rank."""
        self._tell = tell
        self._num_layers = num_layers
        self._layer_bytes = layer_bytes
        self._group_bytes = group_bytes
        self._leases: dict[str, _Told] = {}
        self._running: list[str] = []

    def __len__(self) -> int:
        """Leases that were begun and not forgotten."""
        return len(self._leases)

    def begin(self, chunks: Iterable[tuple[str, int]]) -> None:
        """A pass computes these leases' blocks, each up to its `end_block`. One without a new block is not told of."""
        self._running.clear()
        for lease, end_block in chunks:
            told = self._leases.setdefault(lease, _Told())
            if end_block > told.end_block:
                assert told.end_layer in (0, self._num_layers), f"lease {lease}: a chunk began before the last was told"
                told.first_block, told.end_block, told.end_layer = told.end_block, end_block, 0
            if told.end_block and told.end_layer < self._num_layers:
                self._running.append(lease)

    def reached(self, layer: int) -> None:
        """Everything that the pass writes in layers before `layer` is in memory."""
        for lease in self._running:
            told = self._leases[lease]
            num_blocks = told.end_block - told.first_block
            if (layer - told.end_layer) * num_blocks * self._layer_bytes >= self._group_bytes:
                self._advance(lease, told, layer)

    def finish(self, leases: Iterable[str]) -> None:
        """The pass has ended, well for these leases."""
        for lease in leases:
            if lease in self._running:
                self._advance(lease, self._leases[lease], self._num_layers)
        self._running.clear()

    def forget(self, lease: str) -> None:
        """The lease has ended. Idempotent."""
        self._leases.pop(lease, None)
        if lease in self._running:
            self._running.remove(lease)

    def _advance(self, lease: str, told: _Told, layer: int) -> None:
        if layer > told.end_layer:
            told.end_layer = layer
            self._tell(lease, told.end_block, layer)
