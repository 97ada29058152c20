"""Every face of the copy ops behind one signature, so that one suite can run them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRuns, LayerRows, numpy_twin, paddle_ops, tensor_rows
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps, Path
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
from tests.worker.ops.native import require_core

Copy = Callable[[Sequence[LayerRows], Sequence[LayerRows], CopyRuns], None]
"""Copies all layers; done on return."""


class Face(NamedTuple):
    name: str
    copy: Copy


class Shape(NamedTuple):
    layers: int
    row_bytes: tuple[int, ...]
    """Per role."""
    device_slots: int
    host_slots: int


@dataclass
class Memory:
    """Both tiers, poisoned, with guard bytes around them."""

    shape: Shape
    device: list[tuple[np.ndarray, ...]]
    """Per layer, per role: uint8 `[slots, row_bytes]`."""
    host: np.ndarray
    """uint8 `[slots, block_bytes]`."""
    guards: list[np.ndarray]

    @classmethod
    def random(cls, shape: Shape, rng: np.random.Generator, *, shift: int = 0) -> Memory:
        guards: list[np.ndarray] = []

        def array(rows: int, width: int) -> np.ndarray:
            flat = rng.integers(0, 256, rows * width + 128 + shift, dtype=np.uint8)
            guards.extend((flat[: 64 + shift], flat[64 + shift + rows * width :]))
            return flat[64 + shift : 64 + shift + rows * width].reshape(rows, width)

        device = [
            tuple(array(shape.device_slots, width) for width in shape.row_bytes) for _layer in range(shape.layers)
        ]
        return cls(shape, device, array(shape.host_slots, shape.layers * sum(shape.row_bytes)), guards)

    @property
    def device_rows(self) -> list[LayerRows]:
        return [tuple(rows_of(array) for array in layer) for layer in self.device]

    @property
    def host_rows(self) -> list[LayerRows]:
        return [tuple(rows_of(view) for view in layer) for layer in self.host_views]

    @property
    def host_views(self) -> list[tuple[np.ndarray, ...]]:
        """As `device`, but views into the blocks of the host pool."""
        layers, offset = [], 0
        for _layer in range(self.shape.layers):
            roles = []
            for width in self.shape.row_bytes:
                roles.append(self.host[:, offset : offset + width])
                offset += width
            layers.append(tuple(roles))
        return layers

    def bytes_of_everything(self) -> list[bytes]:
        arrays = [array for layer in self.device for array in layer]
        return [array.tobytes() for array in [*arrays, self.host, *self.guards]]


def rows_of(array: np.ndarray) -> BlockRows:
    return BlockRows(array.ctypes.data, array.shape[0], array.shape[1], array.strides[0], owner=array)


def _twin(targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: CopyRuns) -> None:
    numpy_twin.swap_cache_all_layers(targets, sources, runs, 0)


def _on_a_queue(compiled: CompiledOps) -> Copy:
    def copy(targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: CopyRuns) -> None:
        queue = Queue(compiled.library, "test")
        try:
            for to, of in zip(targets, sources, strict=True):
                compiled.swap_cache_per_layer(to, of, runs, queue.id)
            assert queue.record().wait(-1)
        finally:
            queue.close()

    return copy


def _forced(compiled: CompiledOps, path: Path) -> Copy:
    return lambda targets, sources, runs: compiled.swap_cache_all_layers(targets, sources, runs, 0, path)


def _paddle(targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: CopyRuns) -> None:
    """Which side is the host pool shows in its pitch; Paddle tensors share the memory of the NumPy arrays."""
    import paddle

    to_device = targets[0][0].is_dense
    device, host = (targets, sources) if to_device else (sources, targets)
    first, last = host[0][0], host[-1][-1]
    block_bytes = last.address + last.row_bytes - first.address
    pool = paddle_ops.HostBlocks(first.address, first.num_rows, block_bytes)
    caches = [paddle.to_tensor(rows.array) for layer in device for rows in layer]
    pairs = [(run.source + i, run.target + i) for run in runs for i in range(run.blocks)]
    of, to = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    slots = (to, of) if to_device else (of, to)
    paddle_ops.swap_cache_all_layers(caches, pool, *slots, to_device=to_device)
    if to_device:  # to_tensor copies, so bring the result back
        for rows, cache in zip((rows for layer in device for rows in layer), caches, strict=True):
            rows.array[:] = cache.numpy()


def _paddle_rows(compiled: CompiledOps, *, on_a_queue: bool) -> Copy:
    """As the worker calls them inside FastDeploy: rows owned by tensors, layer by layer or all at once."""

    def copy(targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: CopyRuns) -> None:
        import paddle

        operators = paddle_ops.PaddleOps(compiled)
        to_device = targets[0][0].is_dense
        device, host = (targets, sources) if to_device else (sources, targets)
        caches = [[paddle.to_tensor(rows.array) for rows in layer] for layer in device]
        made = [
            tuple(
                tensor_rows(cache, num_rows=rows.num_rows, row_bytes=rows.row_bytes)
                for cache, rows in zip(tensors, layer, strict=True)
            )
            for tensors, layer in zip(caches, device, strict=True)
        ]
        sides = (made, list(host)) if to_device else (list(host), made)
        if on_a_queue:
            queue = Queue(compiled.library, "test")
            for to, of in zip(*sides, strict=True):
                operators.swap_cache_per_layer(to, of, runs, queue.id)
            assert queue.record().wait(-1)
            queue.close()
        else:
            operators.swap_cache_all_layers(*sides, runs, 0)
        if to_device:  # to_tensor copies, so bring the result back
            for tensors, layer in zip(caches, device, strict=True):
                for cache, rows in zip(tensors, layer, strict=True):
                    rows.array[:] = cache.numpy()

    return copy


FACES = [
    "numpy",
    "compiled",
    "compiled-memcpy",
    "compiled-stream",
    "compiled-queue",
    "paddle",
    "paddle-rows",
    "paddle-rows-queue",
]


def face(name: str) -> Face:
    """Skips the test where this machine has no such implementation, and says which one that was."""
    if name == "numpy":
        return Face(name, _twin)
    compiled = require_core()
    if name.startswith("paddle"):
        pytest.importorskip("paddle")
        if not paddle_ops.LIBRARY.exists():
            pytest.skip("the Paddle operators are not built: scripts/build_ops.sh")
        if name == "paddle":
            return Face(name, _paddle)
        return Face(name, _paddle_rows(compiled, on_a_queue=name.endswith("queue")))
    copies: dict[str, Copy] = {
        "compiled": _forced(compiled, Path.AUTO),
        "compiled-memcpy": _forced(compiled, Path.MEMCPY),
        "compiled-stream": _forced(compiled, Path.STREAM),
        "compiled-queue": _on_a_queue(compiled),
    }
    return Face(name, copies[name])
