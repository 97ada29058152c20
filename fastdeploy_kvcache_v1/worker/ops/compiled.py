"""The ops on the compiled core: same arguments and errors as their twins, and queues to run on."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from .host_memory import HostBuffer
from .library import Library
from .rows import CopyRun, CopyRuns, LayerRows


class Path(IntEnum):
    """How bytes move; see `kvswap.h`. Everything but AUTO is for tests and benchmarks."""

    AUTO = 0
    MEMCPY = 1
    STREAM = 2
    RUNS = 3
    BATCH = 4
    KERNEL = 5
    STAGED = 6


CUDA_PATHS = (Path.KERNEL, Path.STAGED, Path.BATCH, Path.RUNS)
"""In the order in which one stands in for another that fails."""


class Costs(ctypes.Structure):
    """What the parts of a copy in one direction cost, `kvswap_costs`: nanoseconds, and bytes per nanosecond (GB/s)."""

    _fields_ = [
        (name, ctypes.c_double)
        for name in (
            "call_ns",
            "copy_ns",
            "row_ns",
            "engine_rate",
            "batch_ns",
            "descriptor_ns",
            "batch_copy_ns",
            "launch_ns",
            "kernel_start_ns",
            "kernel_rate",
            "gather_rate",
        )
    ]

    def by_name(self) -> dict[str, float]:
        return {name: getattr(self, name) for name, *_ in self._fields_}


class Plan:
    """Runs the core has checked, kept as long as this object lives."""

    def __init__(self, library: Library, runs: CopyRuns) -> None:
        handle = ctypes.c_void_p()
        library.call("kvswap_plan_runs", runs.table.ctypes.data, len(runs), ctypes.byref(handle))
        self.handle = handle
        weakref.finalize(self, library.raw.kvswap_plan_free, handle).atexit = False


class CompiledOps:
    """The ops of one library. Thread-safe."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def swap_cache_per_layer(
        self, targets: LayerRows, sources: LayerRows, runs: Sequence[CopyRun], stream: int, path: Path = Path.AUTO
    ) -> None:
        self._copy([targets], [sources], runs, stream, path)

    def swap_cache_all_layers(
        self,
        targets: Sequence[LayerRows],
        sources: Sequence[LayerRows],
        runs: Sequence[CopyRun],
        stream: int,
        path: Path = Path.AUTO,
    ) -> None:
        self._copy(targets, sources, runs, stream, path)

    def _copy(
        self,
        targets: Sequence[LayerRows],
        sources: Sequence[LayerRows],
        runs: Sequence[CopyRun],
        stream: int,
        path: Path,
    ) -> None:
        to, of = _descriptors(targets), _descriptors(sources)
        plan = self.plan(runs)
        rows = (to.ctypes.data, of.ctypes.data, len(to), plan.handle)
        to_device = targets[0][0].on_gpu
        if to_device or sources[0][0].on_gpu:
            self.library.call("kvswap_cuda_copy", *rows, int(to_device), int(path), stream)
        elif stream:
            self.library.call("kvswap_queue_copy", stream, *rows, int(path))
        else:
            self.library.call("kvswap_copy", *rows, int(path))

    def has_cuda_path(self, path: Path) -> bool:
        """Whether this build and driver have it; says nothing about whether it works."""
        return bool(self.library.raw.kvswap_cuda_has_path(int(path)))

    @property
    def cuda_paths(self) -> frozenset[Path]:
        """What AUTO may choose. A path that turns out not to work leaves it by itself."""
        allowed = self.library.raw.kvswap_cuda_allowed()
        return frozenset(path for path in CUDA_PATHS if allowed & 1 << path)

    def allow_cuda_paths(self, paths: Collection[Path]) -> None:
        """What AUTO may choose from now on; RUNS stays the last resort."""
        self.library.call("kvswap_cuda_allow", sum(1 << path for path in set(paths)))

    def costs(self, *, to_device: bool) -> Costs:
        costs = Costs()
        self.library.call("kvswap_cuda_costs", int(to_device), ctypes.byref(costs))
        return costs

    def set_costs(self, costs: Costs, *, to_device: bool) -> None:
        """Raises `CacheStateError` for a number that is not positive."""
        self.library.call("kvswap_cuda_set_costs", int(to_device), ctypes.byref(costs))

    def set_staging(self, address: int, nbytes: int) -> None:
        """Device memory for STAGED, valid until it is replaced; 0 bytes for none."""
        self.library.call("kvswap_cuda_set_staging", address, nbytes)

    def plan(self, runs: Sequence[CopyRun]) -> Plan:
        """Made once per `CopyRuns`."""
        return CopyRuns.of(runs).prepared(self._plan)

    def _plan(self, runs: CopyRuns) -> Plan:
        return Plan(self.library, runs)

    def host_alloc(self, nbytes: int, numa_node: int = -1) -> HostBuffer:
        address = ctypes.c_void_p()
        self.library.call("kvswap_host_alloc", nbytes, numa_node, ctypes.byref(address))
        assert address.value is not None
        memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
        # Views keep `memory` alive, so the pages go with the last of them; the process's end takes them anyway.
        weakref.finalize(memory, self.library.raw.kvswap_host_free, address, nbytes).atexit = False
        return HostBuffer(memory)


def _descriptors(layers: Sequence[LayerRows]) -> npt.NDArray[np.int64]:
    """An array of `kvswap_rows`: of every layer, of every role."""
    each = [LayerRows.of(layer).descriptors for layer in layers]
    return each[0] if len(each) == 1 else np.concatenate(each)
