"""Both tiers in one poisoned piece of memory, and every way to copy between them behind one signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_kvcache_v1.worker.cuda.copies import MOST_BATCHED
from fastdeploy_kvcache_v1.worker.cuda.rates import Rates, Timing
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopySpans, LayerRows
from fastdeploy_kvcache_v1.worker.ops.copies import Copies, CpuCopies
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime, Runtime
from tests.gpu.stand_in.fake_driver import COMPUTE

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


Copy = Callable[[Memory, CopySpans, bool], None]
"""Copies all layers, to the device or from it; in one call, or layer by layer where it goes to the device."""


def _carry_out(runtime: Runtime, copies: Copies, memory: Memory, spans: CopySpans, to_device: bool) -> None:
    with closing(copies), closing(runtime.new_stream("test")) as stream:
        if to_device:
            for layer in range(len(memory.tiers.device)):
                stream.submit(partial(copies.layer, stream, layer, spans, to_device=True))
        else:
            stream.submit(partial(copies.all_layers, stream, spans, to_device=False))
        stream.record_event().wait()


def on_cpu(memory: Memory, spans: CopySpans, to_device: bool) -> None:
    _carry_out(CpuRuntime(), CpuCopies(memory.device_rows, memory.host_rows), memory, spans, to_device)


def only(way: str) -> Rates:
    """Of a GPU where only this way works."""
    return Rates({way: [[Timing(1024, 1.0, 1.0)]] * 2}, reach=1 << 50)


def on_device(gpu: Any, layers: Sequence[LayerRows], memory: np.ndarray) -> list[LayerRows]:
    """The same rows, as the GPU's."""
    moved = gpu.adopt(memory) - memory.ctypes.data
    return [LayerRows(replace(rows, address=rows.address + moved, on_gpu=True) for rows in layer) for layer in layers]


def by(gpu: Any, way: str) -> Copy:
    def copy(memory: Memory, spans: CopySpans, to_device: bool) -> None:
        runtime = CudaRuntime(compute_handle=COMPUTE, rates=only(way))
        gpu.call("cuMemHostRegister", memory.bytes.ctypes.data, memory.bytes.nbytes, 3)
        copies = runtime.new_copies(on_device(gpu, memory.device_rows, memory.bytes), memory.host_rows)
        assert copies.left == {}
        _carry_out(runtime, copies, memory, spans, to_device)
        gpu.call("cuMemHostUnregister", memory.bytes.ctypes.data)
        assert gpu.faults == []
        assert all(entry[2] <= MOST_BATCHED for entry in gpu.log if entry[0] == "batch")
        assert not len(spans) or any(entry[0] == NAMES[way] for entry in gpu.log)

    return copy


NAMES = {"kernel": "kernel", "batch": "batch", "spans": "copy 2D"}
"""In the fake driver's log."""
