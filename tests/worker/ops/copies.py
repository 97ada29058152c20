"""Both tiers in one poisoned piece of memory, and every way to copy between them behind one signature."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np

from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRuns, LayerRows, cupy_copies, numpy_twin
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps, Path
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
from tests.gpu.stand_in.in_process import COMPUTE, PythonDriver
from tests.worker.ops.native import require_core

Copy = Callable[[Sequence[LayerRows], Sequence[LayerRows], CopyRuns], object]
"""Copies all layers, targets first; done on return."""

GAP = 64
"""Bytes before, between and behind the tensors, which no copy may touch."""


class Tiers(NamedTuple):
    device: list[list[np.ndarray]]
    """Per layer, per role: uint8 `[slots, row_bytes]`."""
    host: np.ndarray
    """uint8 `[slots, block_bytes]`."""

    @property
    def host_roles(self) -> list[list[np.ndarray]]:
        """As `device`, but views into the blocks of the host pool."""
        layers, offset = [], 0
        for roles in self.device:
            layers.append([])
            for role in roles:
                layers[-1].append(self.host[:, offset : offset + role.shape[1]])
                offset += role.shape[1]
        return layers


class Memory:
    """Random bytes, and the tiers in them."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        layers: int = 2,
        widths: Sequence[int] = (40, 8),
        device_slots: int = 6,
        host_slots: int = 6,
        shift: int = 0,
        trailer: int = 0,
    ) -> None:
        """`shift` bytes before the first tensor, `trailer` bytes behind the rows of each host block."""
        self._shapes = [(device_slots, width) for _layer in range(layers) for width in widths]
        self._shapes.append((host_slots, layers * sum(widths) + trailer))
        self._num_roles, self._first = len(widths), GAP + shift
        size = self._first + sum(rows * width + GAP for rows, width in self._shapes)
        self.bytes = rng.integers(0, 256, size, dtype=np.uint8)
        self.tiers = self.tiers_in(self.bytes)

    def tiers_in(self, flat: np.ndarray) -> Tiers:
        arrays, start = [], self._first
        for rows, width in self._shapes:
            arrays.append(flat[start : start + rows * width].reshape(rows, width))
            start += rows * width + GAP
        *device, host = arrays
        step = self._num_roles
        return Tiers([device[first : first + step] for first in range(0, len(device), step)], host)

    @property
    def device_rows(self) -> list[LayerRows]:
        return [LayerRows(map(rows_of, layer)) for layer in self.tiers.device]

    @property
    def host_rows(self) -> list[LayerRows]:
        return [LayerRows(map(rows_of, layer)) for layer in self.tiers.host_roles]


def rows_of(array: np.ndarray) -> BlockRows:
    return BlockRows(array.ctypes.data, array.shape[0], array.shape[1], array.strides[0], owner=array)


def _by(compiled: CompiledOps, path: Path) -> Copy:
    return lambda targets, sources, runs: compiled.swap_cache_all_layers(targets, sources, runs, 0, path)


def _on_a_queue(compiled: CompiledOps) -> Copy:
    def copy(targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: CopyRuns) -> None:
        with closing(Queue(compiled.library, "test")) as queue:
            for to, of in zip(targets, sources, strict=True):
                compiled.swap_cache_per_layer(to, of, runs, queue.id)
            assert queue.record().wait(-1)

    return copy


def by_cupy(gpu: PythonDriver) -> Copy:
    def copy(targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: CopyRuns) -> None:
        def on_gpu(layers: Sequence[LayerRows]) -> list[LayerRows]:
            return [LayerRows(dataclasses.replace(rows, on_gpu=rows.is_dense) for rows in layer) for layer in layers]

        cupy_copies.swap_cache_all_layers(on_gpu(targets), on_gpu(sources), runs, COMPUTE)
        gpu.run_all()

    return copy


def path(name: str) -> Copy:
    """Skips the test where this machine has no such path."""
    if name == "numpy":
        return lambda targets, sources, runs: numpy_twin.swap_cache_all_layers(targets, sources, runs, 0)
    compiled = require_core()
    return _on_a_queue(compiled) if name == "queue" else _by(compiled, Path[name.upper()])


CHECK_NOTHING = ("numpy", "cupy")
"""Their callers do."""

PATHS = (*CHECK_NOTHING, "auto", "memcpy", "stream", "queue")
