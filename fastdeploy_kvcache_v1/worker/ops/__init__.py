"""One face per native op. Which implementation runs is data: a small table, one entry per op and platform.

The compiled core answers where it was built; else NumPy does, and CuPy on GPU memory. `live` says who does, `install`
puts another in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...errors import CacheStateError
from . import cupy_copies, host_memory, library, numpy_twin, queues
from .compiled import CompiledOps
from .host_memory import HostBuffer, host_alloc_shared
from .rows import BlockRows, CopyRun, CopyRuns, LayerRows, plan_runs, tensor_rows

__all__ = [
    "COMPILED",
    "BlockRows",
    "CompiledOps",
    "CopyRun",
    "CopyRuns",
    "HostBuffer",
    "Implementation",
    "LayerRows",
    "host_alloc",
    "host_alloc_shared",
    "host_free",
    "install",
    "live",
    "plan_runs",
    "swap_cache_all_layers",
    "swap_cache_per_layer",
    "tensor_rows",
]


class Implementation(NamedTuple):
    """What answers one op on one platform."""

    name: str
    run: Callable[..., Any]


logger = logging.getLogger(__name__)

TWINS: dict[tuple[str, str], Implementation] = {
    ("swap_cache_per_layer", "cpu"): Implementation("numpy", numpy_twin.swap_cache_per_layer),
    ("swap_cache_per_layer", "cuda"): Implementation("cupy", cupy_copies.swap_cache_per_layer),
    ("swap_cache_all_layers", "cpu"): Implementation("numpy", numpy_twin.swap_cache_all_layers),
    ("swap_cache_all_layers", "cuda"): Implementation("cupy", cupy_copies.swap_cache_all_layers),
    ("host_alloc", "cpu"): Implementation("mmap", host_memory.host_alloc),
    ("host_free", "cpu"): Implementation("mmap", host_memory.host_free),
}
"""What works without a compiler."""

COMPILED: CompiledOps | None = None
"""The compiled core, None where there is none."""

_LIVE: dict[tuple[str, str], Implementation] = dict(TWINS)


def compiled_implementations(ops: CompiledOps) -> dict[tuple[str, str], Implementation]:
    """What `ops` can answer on this machine."""
    platforms = ["cpu"]
    if ops.library.raw.kvswap_cuda_available() == library.OK:
        platforms.append("cuda")
    table = {}
    for platform in platforms:
        table["swap_cache_per_layer", platform] = Implementation("compiled", ops.swap_cache_per_layer)
        table["swap_cache_all_layers", platform] = Implementation("compiled", ops.swap_cache_all_layers)
    table["host_alloc", "cpu"] = Implementation("compiled", ops.host_alloc)
    table["host_free", "cpu"] = Implementation("compiled", host_memory.host_free)
    return table


def _use_the_best() -> None:
    global COMPILED
    core, reason = library.load()
    if core is None:
        logger.warning("no compiled copy ops, NumPy copies instead: %s", reason)
        return
    queues.stop_at_exit(core)
    COMPILED = CompiledOps(core)
    _LIVE.update(compiled_implementations(COMPILED))


_use_the_best()


def live() -> dict[str, str]:
    """Name of the implementation behind every `op.platform`."""
    return {f"{op}.{platform}": implementation.name for (op, platform), implementation in _LIVE.items()}


def install(op: str, platform: str, implementation: Implementation) -> Implementation:
    """Let `implementation` answer `op` on `platform` from now on; returns the one it replaces."""
    if (op, platform) not in _LIVE:
        raise CacheStateError(f"unknown op {op!r} on {platform!r}: choose one of {', '.join(live())}")
    previous: Implementation = _LIVE[op, platform]
    _LIVE[op, platform] = implementation
    return previous


def swap_cache_per_layer(targets: LayerRows, sources: LayerRows, runs: Sequence[CopyRun], *, stream: int = 0) -> None:
    """Copy `runs` (from `plan_runs`) of one layer, all roles.

    On CPU memory the copy has happened on return, or is enqueued on the queue whose id `stream` is; the twin has no
    queues. On GPU memory it is enqueued on the raw CUDA `stream`, which must not be the legacy NULL stream. The memory
    must outlive an enqueued copy. Raises `CacheStateError`, nothing copied, when the two sides do not fit each other or
    the runs. Runs must not overlap a copy that another thread makes.
    """
    runs = CopyRuns.of(runs)
    _check_fit(targets, sources, runs)
    _LIVE["swap_cache_per_layer", _platform(targets, sources)].run(targets, sources, runs, stream)


def swap_cache_all_layers(
    targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: Sequence[CopyRun], *, stream: int = 0
) -> None:
    """As `swap_cache_per_layer`, for every layer."""
    if len(targets) != len(sources) or not targets:
        raise CacheStateError(f"a swap needs the same layers on both sides, got {len(sources)} and {len(targets)}")
    runs = CopyRuns.of(runs)
    for layer_targets, layer_sources in zip(targets, sources, strict=True):
        _check_fit(layer_targets, layer_sources, runs)
    platform = _platform(targets[0], sources[0])
    _LIVE["swap_cache_all_layers", platform].run(targets, sources, runs, stream)


def host_alloc(nbytes: int, *, numa_node: int = -1) -> HostBuffer:
    """Zeroed, page-aligned host memory, from `numa_node` (-1: any) as far as the system lets us.

    Raises `MemoryError` where it refuses.
    """
    buffer: HostBuffer = _LIVE["host_alloc", "cpu"].run(nbytes, numa_node)
    return buffer


def host_free(buffer: HostBuffer) -> None:
    """Give `buffer` back; raises `CacheStateError` the second time."""
    _LIVE["host_free", "cpu"].run(buffer)


def _platform(targets: LayerRows, sources: LayerRows) -> str:
    return "cuda" if targets[0].on_gpu or sources[0].on_gpu else "cpu"


def _check_fit(targets: LayerRows, sources: LayerRows, runs: CopyRuns) -> None:
    if [rows.row_bytes for rows in targets] != [rows.row_bytes for rows in sources] or not targets:
        raise CacheStateError("a swap needs the same roles of the same size on both sides")
    if len({rows.on_gpu for rows in targets}) != 1 or len({rows.on_gpu for rows in sources}) != 1:
        raise CacheStateError("the roles of one side of a swap must be in one kind of memory")
    if targets[0].on_gpu and sources[0].on_gpu:
        raise CacheStateError("a swap copies between GPU and host memory, not between two places on the GPU")
    if not runs:
        return
    if runs.lowest < 0 or any(runs.source_end > rows.num_rows for rows in sources):
        raise CacheStateError(f"a swap reads row {runs.source_end - 1} of {sources[0].num_rows}")
    if any(runs.target_end > rows.num_rows for rows in targets):
        raise CacheStateError(f"a swap writes row {runs.target_end - 1} of {targets[0].num_rows}")
