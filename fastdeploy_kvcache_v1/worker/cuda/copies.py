"""Copies between GPU memory and page-locked host memory: one launch, one batch, or a call per span.

Row addresses are uploaded once and a plan once per step, so a layer costs one launch with 40 bytes of arguments. The
kernel is `custom_ops/copy_rows.cu`; the driver compiles its PTX for every GPU from sm_80 on.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import byref, c_int32, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, TransferError
from ..ops.copies import Copies
from ..ops.rows import BlockRows, CopySpans, LayerRows
from .driver import DriverStream, driver
from .rates import BATCH, KERNEL, SPANS, Rates

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
OUT_AT_ONCE, OUT_BY_LAYER = (1, 1024), (2, 512)
"""Groups and threads of a launch. Where a group runs, a matrix product has no room, and more stores in flight than the
link takes hold up all memory. On an H200 one group moves 32 GB/s and delays a prefill by a twelfth at most: for
swap-outs that the next pass does not wait for. Two move 50 GB/s and delay it by two fifths, in one launch: for
those it waits for. Launches by layer were not measured.
"""
IN_WARPS = 64
"""At least, over all multiprocessors: a swap-in has a group of the same size on each. A pass that waits for it is done
sooner so than beside few large groups (H200: 24.3 instead of 31 ms).
"""


def in_shape(multiprocessors: int) -> tuple[int, int]:
    return multiprocessors, 32 * min(32, -(-IN_WARPS // multiprocessors))


MOST_BATCHED = 4096
"""Copies of one call; drivers crashed at 51,828."""
IN_STREAM_ORDER, UNIFIED = 1, 4
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is never read early. CU_MEMORYTYPE_UNIFIED: any address."""


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("rows", c_uint64),
        ("spans", c_uint64),
        *((name, c_int32) for name in ("first_row", "end_row", "num_spans", "num_blocks", "to_device")),
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


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (*_side("source"), *_side("target"), ("width", c_size_t), ("height", c_size_t))


def copy_2d(
    stream: DriverStream, source: int, source_pitch: int, target: int, target_pitch: int, width: int, height: int
) -> None:
    """Enqueue a copy of `height` rows of `width` bytes between unified addresses."""
    copy = _Copy2D(source_type=UNIFIED, source_address=source, source_pitch=source_pitch, width=width, height=height)
    copy.target_type, copy.target_address, copy.target_pitch = UNIFIED, target, target_pitch
    stream.call("cuMemcpy2DAsync", byref(copy), stream.handle)


def copy_batch(
    stream: DriverStream,
    targets: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
) -> None:
    """Enqueue copies by addresses and bytes, in any order. Sources are read in stream order."""
    attributes, start, failed = _Attributes(IN_STREAM_ORDER), c_size_t(0), c_size_t(0)
    for begin in range(0, len(sizes), MOST_BATCHED):
        some = [array[begin : begin + MOST_BATCHED] for array in (targets, sources, sizes)]
        pointers = [array.ctypes.data for array in some]
        more = (byref(attributes), byref(start), 1, byref(failed), stream.handle)
        stream.call("cuMemcpyBatchAsync", *pointers, len(some[0]), *more, copies=len(some[0]))


class _Kernel:
    """The kernel in one direction, with GPU memory for row addresses and the latest plan.

    An upload is ordered on the stream behind the launches that read the plan before.
    """

    def __init__(self, cupy: Any, function: c_void_p, rows: int, num_rows: int, spans: int, *, to_device: bool) -> None:
        """`rows`, `spans`: addresses of tables on the GPU; `num_rows`: of all layers."""
        self._cupy, self._function = cupy, function
        self._arguments = _Arguments(rows, spans, to_device=to_device)
        self._parameters = (c_void_p * 1)(ctypes.addressof(self._arguments))
        runtime = cupy.cuda.runtime
        count = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, cupy.cuda.Device().id)
        shapes = [in_shape(count)] * 2 if to_device else [OUT_AT_ONCE, OUT_BY_LAYER]
        self._num_rows = num_rows
        self._shapes = [_Launch(groups, 1, 1, threads, 1, 1) for groups, threads in shapes]
        self._at_once, self._by_layer = map(ctypes.addressof, self._shapes)
        self._sources: deque[tuple[Any, Any]] = deque()
        """Events, and page-locked memory that uploads read until then."""

    def upload(self, stream: DriverStream, spans: CopySpans) -> None:
        """Upload the plan of later launches on the same stream."""
        while self._sources and self._sources[0][0].done():
            self._sources.popleft()
        table = spans.table.astype(np.int32)
        table[:, 2] = np.cumsum(table[:, 2]) - table[:, 2]
        size = 1 << max(12, (table.nbytes - 1).bit_length())  # few sizes: CuPy has a pool of them
        source = self._cupy.cuda.alloc_pinned_memory(size)
        ctypes.memmove(source.ptr, table.ctypes.data, table.nbytes)
        stream.call("cuMemcpyHtoDAsync", self._arguments.spans, source.ptr, table.nbytes, stream.handle)
        self._sources.append((stream.record_event(), source))
        for shape in self._shapes:
            shape.stream = stream.handle
        self._arguments.num_spans, self._arguments.num_blocks = len(spans), len(spans.sources)

    def launch(self, stream: DriverStream, first: int, end: int) -> None:
        self._arguments.first_row, self._arguments.end_row = first, end  # the driver copies them at the call
        launch = self._at_once if end - first == self._num_rows else self._by_layer
        stream.call("cuLaunchKernelEx", launch, self._function, self._parameters, None)


class CudaCopies(Copies):
    """Copies by the fastest path of `rates`, with page-locked host memory. One thread submits.

    A call raises `TransferError` if the driver refuses it; a part of its copies may be enqueued then. The constructor
    raises `ConfigError` if no path is left: `spans` failed its trial or was excluded.
    """

    def __init__(self, cupy: Any, device: Sequence[LayerRows], host: Sequence[LayerRows], rates: Rates) -> None:
        super().__init__(device, host)
        self._rates, self._row_bytes = rates, device[0].row_bytes
        self.left = dict(rates.left)
        """Unused paths, with the reason."""
        self._kernels: dict[bool, _Kernel] = {}
        self._device, self._held = cupy.cuda.Device(), ExitStack()
        """The calling thread's GPU, and the release of memory there."""
        reach = max(side.num_rows * side.pitch for pair in self._pairs[True] for side in pair)
        if reach > rates.reach:
            self.left |= {path: f"tiers of {reach} bytes were not tried" for path in rates.paths if path != SPANS}
        elif KERNEL in rates.paths:
            self._load(cupy)
        self._paths = tuple(path for path in rates.paths if path not in self.left)
        if SPANS in rates.left and not self._paths:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in self.left.items())
            raise ConfigError(
                f"no copy path is left between this GPU and {reach} bytes of memory ({reasons}): serve "
                "without a host tier (--swap-space 0)"
            )
        self._latest: dict[bool, tuple[CopySpans | None, str]] = {True: (None, ""), False: (None, "")}
        """Latest spans and their path by direction: all layers of a step share them."""

    def _load(self, cupy: Any) -> None:
        with ExitStack() as held:
            try:
                seen = self._seen()
                rows = np.array([_row(*pair, seen) for pair in self._pairs[True]], ROW)
                function = _load_function(held)
                place = _upload(cupy, rows, held)
                for to_device, pairs in self._pairs.items():
                    spans = _allocate(cupy, 12 * pairs[0][0].num_rows, held)
                    self._kernels[to_device] = _Kernel(cupy, function, place, len(rows), spans, to_device=to_device)
            except (TransferError, cupy.cuda.runtime.CUDARuntimeError) as error:
                self._kernels.clear()
                self.left[KERNEL] = f"the driver refused it: {error}".splitlines()[0]
            else:
                self._held = held.pop_all()

    def _seen(self) -> int:
        """Offset of the GPU's address of host memory, on some systems not 0. Raises `TransferError`."""
        host, seen, found = self._pairs[True][0][1], c_uint64(), set()
        for address in (host.address, host.address + (host.num_rows - 1) * host.pitch):
            driver().call("cuMemHostGetDevicePointer", byref(seen), address, 0)
            found.add(seen.value - address)
        if len(found) > 1:
            raise TransferError("the GPU sees parts of the host tier at other distances than this process")
        return found.pop()

    def _copy(self, stream: DriverStream, first: int, end: int, spans: CopySpans, to_device: bool) -> None:
        latest, path = self._latest[to_device]
        if spans is not latest:
            path = self._begin(stream, spans, to_device)
        if path == KERNEL:
            self._kernels[to_device].launch(stream, first, end)
        elif path == BATCH:
            rows = self._rows[to_device][first:end, None]
            targets = rows["target"] + (rows["target_pitch"] * spans.targets).view(np.uint64)
            sources = rows["source"] + (rows["source_pitch"] * spans.sources).view(np.uint64)
            sizes = np.repeat(rows["bytes"].astype(np.uint64), len(spans.targets))
            copy_batch(stream, targets.ravel(), sources.ravel(), sizes)
        elif path == SPANS:
            for target, source, target_pitch, source_pitch, nbytes in self._rows[to_device][first:end].tolist():
                for of, to, blocks in spans:
                    places = source + of * source_pitch, source_pitch, target + to * target_pitch, target_pitch
                    copy_2d(stream, *places, nbytes, blocks)

    def _begin(self, stream: DriverStream, spans: CopySpans, to_device: bool) -> str:
        """Choose the path of `spans`; empty without blocks."""
        blocks, path = len(spans.sources), ""
        if blocks:
            path = self._rates.fastest(self._row_bytes, blocks, len(spans), to_device=to_device, among=self._paths)
        if path == KERNEL:
            self._kernels[to_device].upload(stream, spans)
        self._latest[to_device] = spans, path
        return path

    def close(self) -> None:
        self._kernels.clear()
        self._device.use()
        self._held.close()


def _load_function(held: ExitStack) -> c_void_p:
    module, function = c_void_p(), c_void_p()
    driver().call("cuModuleLoadData", byref(module), PTX.read_bytes())
    held.callback(driver().call, "cuModuleUnload", module)
    driver().call("cuModuleGetFunction", byref(function), module, b"copy_cache_rows")
    return function


def _allocate(cupy: Any, nbytes: int, held: ExitStack) -> int:
    place = int(cupy.cuda.runtime.malloc(nbytes))
    held.callback(cupy.cuda.runtime.free, place)
    return place


def _upload(cupy: Any, rows: npt.NDArray[Any], held: ExitStack) -> int:
    runtime, place = cupy.cuda.runtime, _allocate(cupy, rows.nbytes, held)
    runtime.memcpy(place, rows.ctypes.data, rows.nbytes, runtime.memcpyHostToDevice)
    runtime.streamSynchronize(0)  # the call may return before the last bytes have arrived
    return place


def _row(device: BlockRows, host: BlockRows, seen: int) -> tuple[int, ...]:
    """Make a row of the kernel's table. `seen` is added to host addresses; unit: the widest aligned access."""
    address = host.address + seen
    borders = device.address | device.pitch | device.row_bytes | address | host.pitch
    unit = next(unit for unit in (16, 4, 1) if borders % unit == 0)
    return device.address, address, device.pitch, host.pitch, device.row_bytes, unit
