"""Memory of a GPU and ways to copy, for the suite and the benchmark: CuPy, NumPy and this package, no Paddle.

The files of this folder import each other by their bare names: a package `tests` of another project may come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import cupy
import numpy as np

from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRuns, LayerRows, cupy_copies
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps, Path

PATHS = (Path.RUNS, Path.BATCH, Path.KERNEL, Path.STAGED)
CUPY = "cupy"

Copy = Callable[[Sequence[LayerRows], Sequence[LayerRows], CopyRuns, int], None]
"""Enqueues the copy of all layers on a raw stream."""

LayerCopy = Callable[[LayerRows, LayerRows, CopyRuns, int], None]
"""That of one layer."""


def core() -> CompiledOps:
    if ops.COMPILED is None:
        raise SystemExit("error: there is no compiled core: scripts/build_ops.sh")
    if ops.COMPILED.library.raw.kvswap_cuda_available() != 0:
        raise SystemExit(f"error: {ops.COMPILED.library.raw.kvswap_last_error().decode()}")
    return ops.COMPILED


def land() -> ops.Landing:
    """As a worker does when it page-locks its pool: tries every path, times them, gives STAGED its memory."""
    buffer = ops.host_alloc(8 << 20)
    cupy.cuda.runtime.hostRegister(buffer.address, buffer.nbytes, 0)
    try:
        return ops.land(cupy, 0, buffer)
    finally:
        cupy.cuda.runtime.hostUnregister(buffer.address)


class Way(NamedTuple):
    """One way to copy."""

    all_layers: Copy
    per_layer: LayerCopy


def ways() -> dict[str, Way]:
    """Every way to copy that lives on this machine."""
    compiled, live = core(), land().live
    found = {
        CUPY: Way(cupy_copies.swap_cache_all_layers, cupy_copies.swap_cache_per_layer),
        "auto": Way(compiled.swap_cache_all_layers, compiled.swap_cache_per_layer),
    }
    return found | {path.name.lower(): _forced(compiled, path) for path in PATHS if path.name.lower() in live}


def _forced(compiled: CompiledOps, path: Path) -> Way:
    """STAGED goes to the host only; into the device its kernel copies."""

    def by(target: BlockRows) -> Path:
        return Path.KERNEL if path is Path.STAGED and target.on_gpu else path

    def all_layers(targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: CopyRuns, stream: int) -> None:
        compiled.swap_cache_all_layers(targets, sources, runs, stream, by(targets[0][0]))

    def per_layer(targets: LayerRows, sources: LayerRows, runs: CopyRuns, stream: int) -> None:
        compiled.swap_cache_per_layer(targets, sources, runs, stream, by(targets[0]))

    return Way(all_layers, per_layer)


@contextmanager
def copies_by(way: Way) -> Iterator[None]:
    """What the package copies meanwhile goes this way."""
    chosen = {"swap_cache_all_layers": way.all_layers, "swap_cache_per_layer": way.per_layer}
    before = {op: ops.install(op, "cuda", ops.Implementation("chosen", run)) for op, run in chosen.items()}
    try:
        yield
    finally:
        for op, one in before.items():
            ops.install(op, "cuda", one)


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
