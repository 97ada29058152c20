"""Memory of a GPU and ways to copy, for the suite and the benchmark: CuPy, NumPy and this package, no Paddle.

The files of this folder import each other by their bare names: a package `tests` of another project may come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.cuda.rates import Rates, Timing
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime
from fastdeploy_kvcache_v1.worker.ops import BlockRows, LayerRows


def only(way: str) -> Rates:
    """As if nothing else worked on this GPU."""
    return Rates({way: [[Timing(1024, 1.0, 1.0)]] * 2}, reach=1 << 50)


def runtime(way: str, compute: Any) -> CudaRuntime:
    """Whose copies all go this way. `compute`: the stream of the passes."""
    return CudaRuntime(compute_handle=int(compute.ptr), rates=only(way))


@contextmanager
def page_locked(nbytes: int) -> Iterator[np.ndarray]:
    """uint8 `[nbytes]`."""
    buffer = ops.host_alloc(nbytes)
    cupy.cuda.runtime.hostRegister(buffer.address, nbytes, 3)
    try:
        yield buffer.array
    finally:
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.hostUnregister(buffer.address)


def device_rows(arrays: Sequence[Any]) -> LayerRows:
    """Of CuPy arrays uint8 `[slots, bytes]`."""
    return LayerRows(
        BlockRows(int(array.data.ptr), array.shape[0], array.shape[1], array.shape[1], on_gpu=True, owner=array)
        for array in arrays
    )


def host_rows(pool: np.ndarray, slots: int, widths: Sequence[Sequence[int]]) -> list[LayerRows]:
    """Of a block-major pool: `widths[layer][role]` bytes."""
    block, address, layers = sum(map(sum, widths)), pool.ctypes.data, []
    for roles in widths:
        rows = []
        for width in roles:
            rows.append(BlockRows(address, slots, width, block, owner=pool))
            address += width
        layers.append(LayerRows(rows))
    return layers
