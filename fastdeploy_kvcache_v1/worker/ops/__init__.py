"""One face per native op. Which implementation runs is data: a small table, one entry per op and platform.

The compiled core answers where it was built; else NumPy does, and CuPy on GPU memory. `live` says who does, `install`
puts another in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...errors import CacheStateError, ConfigError
from ...metadata import CopyPath
from . import cupy_copies, host_memory, landing, library, numpy_twin, queues
from .compiled import CompiledOps
from .host_memory import HostBuffer, host_alloc_shared, keep_to_this_process
from .landing import Landing
from .rows import BlockRows, CopyRun, CopyRuns, LayerRows, plan_runs, tensor_rows

__all__ = [
    "COMPILED",
    "BlockRows",
    "CompiledOps",
    "CopyRun",
    "CopyRuns",
    "HostBuffer",
    "Implementation",
    "Landing",
    "LayerRows",
    "copy_paths",
    "host_alloc",
    "host_alloc_shared",
    "host_free",
    "install",
    "keep_to_this_process",
    "land",
    "landed",
    "live",
    "plan_runs",
    "swap_cache_all_layers",
    "swap_cache_per_layer",
    "tensor_rows",
    "warn_of_slow_copies",
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


_why_not_compiled = ""


def _use_the_best() -> None:
    global COMPILED, _why_not_compiled
    core, _why_not_compiled = library.load()
    if core is None:
        return
    queues.stop_at_exit(core)
    COMPILED = CompiledOps(core)
    _LIVE.update(compiled_implementations(COMPILED))


_use_the_best()


def warn_of_slow_copies() -> None:
    """Says in the log why copies are slower than they could be. For servers, when nothing of their start can fail."""
    if COMPILED is None:
        logger.warning("no compiled copy ops, NumPy copies instead: %s", _why_not_compiled)


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


_landed: Landing | None = None


def land(cupy: Any, device: int, host: HostBuffer) -> Landing:
    """Try the ways to copy between GPU `device` and the page-locked `host`, whose bytes are zero afterwards, and use
    those that work. Once per process: later calls return what the first one found. Raises `ConfigError` for a
    `FASTDEPLOY_KVCACHE_CUDA_PATH` that names no path, or one that this build lacks."""
    global _landed
    if _landed is None:
        _landed = _land(cupy, device, host)
        if not _landed.works:
            for op in ("swap_cache_per_layer", "swap_cache_all_layers"):
                install(op, "cuda", TWINS[op, "cuda"])
    return _landed


def _land(cupy: Any, device: int, host: HostBuffer) -> Landing:
    choice = landing.read_choice()
    if COMPILED is not None and live()["swap_cache_per_layer.cuda"] == "compiled":
        return landing.land(COMPILED, cupy, device, host, choice)
    if choice.forced not in (None, landing.CUPY):
        raise ConfigError(f"{landing.CHOICE}={choice.forced} needs the compiled core: run scripts/build_ops.sh")
    return Landing((landing.CUPY,))


def landed() -> Landing | None:
    """What `land` found in this process, None before."""
    return _landed


def copy_paths(platform: str) -> tuple[CopyPath, ...]:
    """Which ways copies between device and host take on `platform`, `cpu` or `cuda`, and which were left. Empty on a
    GPU before `land`."""
    if platform == "cpu":
        return tuple(CopyPath(direction, live()[f"{op}.cpu"]) for direction, op in _OP_OF_DIRECTION.items())
    if _landed is None:
        return ()
    if COMPILED is None or not _landed.works:
        return _landed.paths(_landed.live)
    return _landed.paths({path.name.lower() for path in COMPILED.cuda_paths})


_OP_OF_DIRECTION = {"in": "swap_cache_per_layer", "out": "swap_cache_all_layers"}


def swap_cache_per_layer(
    targets: Sequence[BlockRows], sources: Sequence[BlockRows], runs: Sequence[CopyRun], *, stream: int = 0
) -> None:
    """Copy `runs` (from `plan_runs`) of one layer, all roles.

    On CPU memory the copy has happened on return, or is enqueued on the queue whose id `stream` is; the twin has no
    queues. On GPU memory it is enqueued on the raw CUDA `stream`, which must not be the legacy NULL stream. The memory
    must outlive an enqueued copy. Raises `CacheStateError`, nothing copied, when the two sides do not fit each other or
    the runs. Runs must not overlap a copy that another thread makes.
    """
    to, of, runs = LayerRows.of(targets), LayerRows.of(sources), CopyRuns.of(runs)
    _check_fit(to, of, runs)
    _LIVE["swap_cache_per_layer", _platform(to, of)].run(to, of, runs, stream)


def swap_cache_all_layers(
    targets: Sequence[Sequence[BlockRows]],
    sources: Sequence[Sequence[BlockRows]],
    runs: Sequence[CopyRun],
    *,
    stream: int = 0,
) -> None:
    """As `swap_cache_per_layer`, for every layer."""
    if len(targets) != len(sources) or not targets:
        raise CacheStateError(f"a swap needs the same layers on both sides, got {len(sources)} and {len(targets)}")
    to, of, runs = [*map(LayerRows.of, targets)], [*map(LayerRows.of, sources)], CopyRuns.of(runs)
    for layer_to, layer_of in zip(to, of, strict=True):
        _check_fit(layer_to, layer_of, runs)
    _LIVE["swap_cache_all_layers", _platform(to[0], of[0])].run(to, of, runs, stream)


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
    return "cuda" if targets.on_gpu or sources.on_gpu else "cpu"


def _check_fit(targets: LayerRows, sources: LayerRows, runs: CopyRuns) -> None:
    """Runs per layer, on the thread that computes."""
    if targets.row_bytes != sources.row_bytes or not targets:
        raise CacheStateError("a swap needs the same roles of the same size on both sides")
    if targets.on_gpu and sources.on_gpu:
        raise CacheStateError("a swap copies between GPU and host memory, not between two places on the GPU")
    if not runs:
        return
    if runs.source_end > sources.num_rows:
        raise CacheStateError(f"a swap reads row {runs.source_end - 1} of {sources.num_rows}")
    if runs.target_end > targets.num_rows:
        raise CacheStateError(f"a swap writes row {runs.target_end - 1} of {targets.num_rows}")
    if runs.lowest < 0:
        raise CacheStateError(f"a swap has a negative row: {runs.lowest}")
