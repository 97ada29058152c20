"""Memory, streams and kernels of a GPU for the suite and the benchmark: CuPy, NumPy and this package, no Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRuns, LayerRows, cupy_copies
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps, Path

Copy = Callable[[Sequence[LayerRows], Sequence[LayerRows], CopyRuns, int], None]
"""Enqueues the copy of all layers on a raw stream."""

WORK = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
extern "C" __global__ void fill(unsigned char* bytes, long long count, int value) {
  const long long step = gridDim.x * (long long)blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step)
    bytes[i] = (unsigned char)value;
}
extern "C" __global__ void compute(float* out, int rounds) {
  float a = threadIdx.x, b = blockIdx.x;
  for (int i = 0; i < rounds; ++i) { a = fmaf(a, 0.5f, b); b = fmaf(b, 0.5f, a); }
  out[blockIdx.x * blockDim.x + threadIdx.x] = a + b;
}
"""


def kernel(name: str) -> Any:
    return cupy.RawKernel(WORK, name)


def core() -> CompiledOps:
    if ops.COMPILED is None:
        raise SystemExit("error: there is no compiled core: scripts/build_ops.sh")
    if ops.COMPILED.library.raw.kvswap_cuda_available() != 0:
        raise SystemExit(f"error: {ops.COMPILED.library.raw.kvswap_last_error().decode()}")
    return ops.COMPILED


def implementations() -> dict[str, Copy]:
    """Every way to copy that this machine has."""
    compiled = core()
    copies: dict[str, Copy] = {"cupy": cupy_copies.swap_cache_all_layers, "auto": compiled.swap_cache_all_layers}
    for path in (Path.RUNS, Path.BATCH, Path.KERNEL):
        if compiled.library.raw.kvswap_cuda_has_path(int(path)):
            copies[path.name.lower()] = _forced(compiled, path)
    return copies


def _forced(compiled: CompiledOps, path: Path) -> Copy:
    return lambda targets, sources, runs, stream: compiled.swap_cache_all_layers(targets, sources, runs, stream, path)


@contextmanager
def page_locked(nbytes: int) -> Iterator[np.ndarray]:
    """uint8 `[nbytes]`."""
    buffer = ops.host_alloc(nbytes)
    cupy.cuda.runtime.hostRegister(buffer.address, nbytes, 0)
    try:
        yield buffer.array
    finally:
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.hostUnregister(buffer.address)


def device_rows(arrays: Sequence[Any]) -> LayerRows:
    """Of CuPy arrays uint8 `[slots, bytes]`."""
    return tuple(
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
        layers.append(tuple(rows))
    return layers
