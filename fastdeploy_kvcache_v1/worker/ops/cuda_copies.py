"""Copies between the memory of a GPU and page-locked host memory: one launch, one batch, or a call for each run.

Where rows are is uploaded once, and a plan once per step, so that a layer costs one launch with 40 bytes of arguments,
however many runs there are. The kernel is `custom_ops/copy_rows.cu`; its PTX travels with the package and the driver
compiles it, for every GPU from sm_80 on.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_int32, c_size_t, c_uint, c_uint64, c_void_p
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, TransferError
from .copies import Copies, require_fit
from .driver import DriverEvent, DriverStream, driver
from .rates import BATCH, KERNEL, RUNS, Rates
from .rows import BlockRows, CopyRuns, LayerRows

PTX = Path(__file__).with_name("copy_rows.ptx")

ROW = np.dtype(
    [
        ("device", "u8"),
        ("host", "u8"),
        ("device_pitch", "i8"),
        ("host_pitch", "i8"),
        ("bytes", "i4"),
        ("unit", "i4"),
    ]
)
"""As in the kernel's source."""

GROUPS, THREADS = 8, 256
"""Of a launch; as in the kernel's source."""

MOST_BATCHED = 4096
"""Copies of one call; drivers were seen to crash at 51,828."""

IN_STREAM_ORDER, UNIFIED = 1, 4
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is never read early. CU_MEMORYTYPE_UNIFIED: any address."""


class _Arguments(ctypes.Structure):
    """Of the kernel."""

    _fields_ = (
        ("rows", c_uint64),
        ("runs", c_uint64),
        *((name, c_int32) for name in ("first_row", "end_row", "num_runs", "num_blocks", "to_device")),
    )


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{of}_{axis}", c_uint) for of in ("groups", "threads") for axis in "xyz"),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("access_order", c_uint), ("hints", c_uint * 4), ("flags", c_uint))


def _side(name: str) -> list[tuple[str, Any]]:
    of_bytes = [("x", c_size_t), ("y", c_size_t), ("type", c_uint), ("host", c_void_p), ("address", c_uint64)]
    return [(f"{name}_{part}", kind) for part, kind in [*of_bytes, ("array", c_void_p), ("pitch", c_size_t)]]


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (*_side("source"), *_side("target"), ("width", c_size_t), ("height", c_size_t))

    @classmethod
    def between(cls, source: int, source_pitch: int, target: int, target_pitch: int, width: int, height: int) -> Copy2D:
        """`height` rows of `width` bytes, anywhere: the addresses say whose memory they are."""
        return cls(
            source_type=UNIFIED,
            source_address=source,
            source_pitch=source_pitch,
            target_type=UNIFIED,
            target_address=target,
            target_pitch=target_pitch,
            width=width,
            height=height,
        )


def copy_batch(
    stream: DriverStream,
    targets: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
) -> None:
    """Enqueue copies by addresses and bytes, in any order, each source read in the order of the stream."""
    attributes, start, failed = _Attributes(IN_STREAM_ORDER), c_size_t(0), c_size_t(0)
    for begin in range(0, len(sizes), MOST_BATCHED):
        some = [array[begin : begin + MOST_BATCHED] for array in (targets, sources, sizes)]
        pointers = [array.ctypes.data for array in some]
        more = (byref(attributes), byref(start), 1, byref(failed), stream.handle)
        stream.call("cuMemcpyBatchAsync", *pointers, len(some[0]), *more)


class _Plan(NamedTuple):
    """What is found out once for the copies of a step in one direction."""

    runs: CopyRuns
    way: str
    num_blocks: int
    table: npt.NDArray[np.int32]
    """`[runs, 3]`: source, target, blocks of the runs before."""


class _Direction:
    """The kernel in one direction: its arguments, and the plan that was uploaded for them last.

    A plan lies behind the one before it on the stream, whose kernels have read that one by then.
    """

    def __init__(self, cupy: Any, function: c_void_p, rows: int, num_slots: int, *, to_device: bool) -> None:
        self._cupy, self._function = cupy, function
        self._arguments = _Arguments(rows, cupy.cuda.runtime.malloc(12 * num_slots), to_device=to_device)
        self._parameters = (c_void_p * 1)(ctypes.addressof(self._arguments))
        self._shape = _Launch(GROUPS, 1, 1, THREADS, 1, 1)
        self._launch = ctypes.addressof(self._shape)
        self._uploaded: _Plan | None = None
        self._sources: deque[tuple[DriverEvent, Any]] = deque()
        """Page-locked memory that an upload may still read."""

    def launch(self, stream: DriverStream, first: int, end: int, plan: _Plan) -> None:
        if self._uploaded is not plan:
            self._upload(stream, plan)
        self._arguments.first_row, self._arguments.end_row = first, end  # the driver copies them at the call
        stream.call("cuLaunchKernelEx", self._launch, self._function, self._parameters, None)

    def _upload(self, stream: DriverStream, plan: _Plan) -> None:
        while self._sources and self._sources[0][0].done():
            self._sources.popleft()
        nbytes = plan.table.nbytes
        source = self._cupy.cuda.alloc_pinned_memory(1 << max(12, (nbytes - 1).bit_length()))  # few sizes: CuPy's pool
        ctypes.memmove(source.ptr, plan.table.ctypes.data, nbytes)
        stream.call("cuMemcpyHtoDAsync", self._arguments.runs, source.ptr, nbytes, stream.handle)
        self._sources.append((stream.record_event(), source))
        self._uploaded = plan
        self._shape.stream = stream.handle
        self._arguments.num_runs, self._arguments.num_blocks = len(plan.runs), plan.num_blocks

    def close(self) -> None:
        self._sources.clear()
        self._cupy.cuda.runtime.free(self._arguments.runs)


class _Kernel:
    """The loaded kernel and its memory on the GPU. Raises `TransferError` where the driver refuses it."""

    def __init__(self, cupy: Any, rows: npt.NDArray[Any], num_slots: dict[bool, int]) -> None:
        self._cupy, self._driver = cupy, driver()
        self._rows = cupy.cuda.runtime.malloc(rows.nbytes)  # the first call: the context is there from now on
        self._module, function = c_void_p(), c_void_p()
        self._driver.call("cuModuleLoadData", byref(self._module), PTX.read_bytes())
        self._driver.call("cuModuleGetFunction", byref(function), self._module, b"copy_cache_rows")
        cupy.cuda.runtime.memcpy(self._rows, rows.ctypes.data, rows.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
        cupy.cuda.runtime.streamSynchronize(0)  # the call may return while the last bytes are on their way
        self.directions = {
            way: _Direction(cupy, function, self._rows, slots, to_device=way) for way, slots in num_slots.items()
        }

    def close(self) -> None:
        for direction in self.directions.values():
            direction.close()
        self._cupy.cuda.runtime.free(self._rows)
        self._driver.call("cuModuleUnload", self._module)


class CudaCopies(Copies):
    """Host memory is page-locked. The way of a copy is the fastest one of `rates`; `left` says what it does without.

    One thread submits. What it enqueues needs nothing of this process but the memory itself. A call raises
    `TransferError` for what the driver refuses; a part of its copies may be enqueued then. Raises `ConfigError` where
    no way is left: plain copies are none where they failed their trial, or the operator left them out.
    """

    def __init__(self, cupy: Any, device: Sequence[LayerRows], host: Sequence[LayerRows], rates: Rates) -> None:
        require_fit(device, host)
        self._rates, self._row_bytes = rates, device[0].row_bytes
        pairs = [*zip(chain(*device), chain(*host), strict=True)]
        self.left = dict(rates.left)
        """Ways that are not used here, and why."""
        seen = self._host_as_seen_by_the_gpu(host[0][0].address)
        rows = [
            (of.address, to.address + seen, of.pitch, to.pitch, of.row_bytes, _unit(of, to, seen)) for of, to in pairs
        ]
        self._rows = np.array(rows, ROW)
        self._host_addresses = np.array([to.address for _of, to in pairs], np.uint64)
        self._kernel: _Kernel | None = None
        self._plans: dict[bool, _Plan | None] = {True: None, False: None}
        """By direction, the latest: all layers of a step go by one."""
        reach = max(side.num_rows * side.pitch for pair in pairs for side in pair)
        if reach > rates.reach:
            self.left |= {way: f"tiers of {reach} bytes were not tried" for way in rates.ways if way != RUNS}
        elif KERNEL in rates.ways and KERNEL not in self.left:
            self._kernel = self._load(cupy, {True: device[0][0].num_rows, False: host[0][0].num_rows})
        self._ways = tuple(way for way in rates.ways if way not in self.left)
        if RUNS in rates.left and not self._ways:
            reasons = "; ".join(f"{way}: {reason}" for way, reason in self.left.items())
            raise ConfigError(f"nothing copies between this GPU and {reach} bytes of memory ({reasons})")

    def _host_as_seen_by_the_gpu(self, address: int) -> int:
        """What is to be added to a host address for the kernel, which on some systems is not 0."""
        found = c_uint64()
        try:
            driver().call("cuMemHostGetDevicePointer", byref(found), address, 0)
        except TransferError as error:
            self.left[KERNEL] = f"kernels do not reach the host memory: {error}"
        return found.value - address if found.value else 0

    def _load(self, cupy: Any, num_slots: dict[bool, int]) -> _Kernel | None:
        try:
            return _Kernel(cupy, self._rows, num_slots)
        except (TransferError, cupy.cuda.runtime.CUDARuntimeError) as error:
            self.left[KERNEL] = f"the driver refuses it: {error}".splitlines()[0]
            return None

    def _plan(self, runs: CopyRuns, to_device: bool) -> _Plan:
        blocks = len(runs.sources)
        way = self._rates.fastest(self._row_bytes, blocks, len(runs), to_device=to_device, among=self._ways)
        table = runs.table.astype(np.int32)
        table[:, 2] = np.cumsum(table[:, 2]) - table[:, 2]
        return _Plan(runs, way, blocks, table)

    def layer(self, stream: DriverStream, layer: int, runs: CopyRuns, to_device: bool) -> None:
        roles = len(self._row_bytes)
        self._copy(stream, layer * roles, (layer + 1) * roles, runs, to_device)

    def all_layers(self, stream: DriverStream, runs: CopyRuns, to_device: bool) -> None:
        self._copy(stream, 0, len(self._rows), runs, to_device)

    def _copy(self, stream: DriverStream, first: int, end: int, runs: CopyRuns, to_device: bool) -> None:
        plan = self._plans[to_device]
        if plan is None or plan.runs is not runs:
            plan = self._plans[to_device] = self._plan(runs, to_device)
        if not plan.num_blocks:
            return
        if plan.way == KERNEL and self._kernel is not None:
            self._kernel.directions[to_device].launch(stream, first, end, plan)
        elif plan.way == BATCH:
            self._batch(stream, first, end, runs, to_device)
        else:
            self._by_runs(stream, first, end, runs, to_device)

    def _batch(self, stream: DriverStream, first: int, end: int, runs: CopyRuns, to_device: bool) -> None:
        rows = self._rows[first:end, None]
        on_device, on_host = (runs.targets, runs.sources) if to_device else (runs.sources, runs.targets)
        device = (rows["device"] + (rows["device_pitch"] * on_device).view(np.uint64)).ravel()
        host = (self._host_addresses[first:end, None] + (rows["host_pitch"] * on_host).view(np.uint64)).ravel()
        targets, sources = (device, host) if to_device else (host, device)
        sizes = np.repeat(rows["bytes"].astype(np.uint64).ravel(), len(on_device))
        copy_batch(stream, targets, sources, sizes)

    def _by_runs(self, stream: DriverStream, first: int, end: int, runs: CopyRuns, to_device: bool) -> None:
        for row, host_address in zip(self._rows[first:end], self._host_addresses[first:end].tolist(), strict=True):
            device, host = (int(row["device"]), int(row["device_pitch"])), (host_address, int(row["host_pitch"]))
            (target, target_pitch), (source, source_pitch) = (device, host) if to_device else (host, device)
            for of, to, blocks in runs:
                places = source + of * source_pitch, source_pitch, target + to * target_pitch, target_pitch
                copy = Copy2D.between(*places, int(row["bytes"]), blocks)
                stream.call("cuMemcpy2DAsync", byref(copy), stream.handle)

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None


def _unit(device: BlockRows, host: BlockRows, seen: int) -> int:
    """Bytes of the widest access that every row allows."""
    borders = device.address | device.pitch | device.row_bytes | (host.address + seen) | host.pitch
    return next(unit for unit in (16, 4, 1) if borders % unit == 0)
