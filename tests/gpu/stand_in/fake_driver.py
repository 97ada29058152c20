"""A CUDA driver in Python: what `libcuda.so.1` exports, with C's calling convention, over a GPU of memory files.

It keeps what callers rely on, and no more: streams are FIFOs that only move when somebody asks for progress, in an
order that a seed decides; a stream that waits for an event stands still until then; a copy or a kernel goes piece by
piece, so that others get between; addresses of the device and of page-locked memory as kernels know it are no addresses
of this process; what is against the rules is remembered in `faults` and breaks the context.
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import random
import struct
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any, NamedTuple

import numpy as np

INVALID, NOT_READY, ILLEGAL, MISALIGNED, LAUNCH_FAILED = 1, 600, 700, 716, 719
COMPUTE = 1
"""Raw handle of the stream that plays Paddle's."""

ON_DEVICE, SEEN_BY_KERNELS = 1 << 48, 1 << 47
"""What is added to where the bytes really are: to a device's address, and to the device's address of host memory."""

OF_A_DEVICE = {
    *("cuStreamCreate", "cuEventCreate", "cuMemAlloc", "cuMemGetInfo", "cuMemHostRegister", "cuModuleLoadData"),
    *("cuModuleUnload", "cuLaunchKernelEx"),
}
"""What the calling thread's GPU decides."""

DEPTH = 1024
"""Entries of a stream; who submits one more waits."""

UUID = b"\x01" * 16


class Refused(Exception):
    """A call answers `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class CUDARuntimeError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int, call: str) -> None:
        super().__init__(f"cudaError{status}: {call}")
        self.status = status


class Arguments(ctypes.Structure):
    """Of `copy_cache_rows`, as the kernel's source has them."""

    _fields_ = [("rows", c_uint64), ("spans", c_uint64)] + [
        (name, ctypes.c_int32) for name in ("first_row", "end_row", "num_spans", "num_blocks", "to_device")
    ]


ROW = np.dtype([*((n, "u8") for n in ("device", "host")), ("dp", "i8"), ("hp", "i8"), ("bytes", "i4"), ("unit", "i4")])
COPY_2D = struct.Struct("QQi4xQQQQQQi4xQQQQQQ")
"""CUDA_MEMCPY2D."""

LAUNCH = struct.Struct("7I4xQQI4x")
"""CUlaunchConfig."""

P, Z, N, U = c_uint64, c_size_t, c_int, c_uint
HANDLE, UUID_BYTES = ctypes.c_char * 64, ctypes.c_char * 16
"""C's types, as methods are annotated with: what is given, and what is written through pointers, which come first."""


class _ByValue(ctypes.Structure):
    _fields_ = [("bytes", HANDLE)]


@dataclass
class _Stream:
    is_blocking: bool
    queue: deque[Callable[[], bool | None]] = field(default_factory=deque)
    """Each goes a step, if it can, and says whether it is done; None when it went on and is not."""
    submitted: int = 0
    ended: int = 0


@dataclass
class _Event:
    is_timed: bool
    recorded: int = 0
    ended: int = 0
    time: float = 0.0


class _Memory(NamedTuple):
    """Of the device."""

    bytes: Any
    size: int
    file: int = -1
    """Which other processes can map."""


def _start_of(ranges: Iterable[tuple[int, int]], address: int, nbytes: int = 1) -> int | None:
    """Where the range begins that has all of these bytes. `ranges`: begins and sizes."""
    return next((start for start, size in ranges if start <= address and address + nbytes <= start + size), None)


class FakeGpu:
    """`log` holds what was asked for, in order. `statuses`: what a call answers instead of what it does, by name.
    `copy_ns(way, pieces, bytes_of_a_piece)`: how long a copy takes.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.log: list[tuple[Any, ...]] = []
        self.faults: list[str] = []
        self.statuses: dict[str, int] = {}
        self.missing: set[str] = set()
        """Functions that this driver lacks."""
        self.now = 0.0
        self.copy_ns: Callable[[str, int, int], float] = lambda way, pieces, width: 1e6
        self.progress_on_query = True
        self.free_bytes = 1 << 28
        self.compute_mode = 0
        """3: one process at a time."""
        self.registered: dict[int, int] = {}
        self.modules: set[int] = set()
        self.device = 0
        """The calling thread's, and those that it was when it mattered."""
        self.devices: set[int] = set()
        self.broken = 0
        """The error that broke the context."""
        self._streams = {0: _Stream(True), COMPUTE: _Stream(True)}
        self._events: dict[int, _Event] = {}
        self._memory: dict[int, _Memory] = {}
        """By where it begins in this process."""
        self._mapped: dict[int, _Memory] = {}
        """Of other processes."""
        self._freed: deque[Any] = deque(maxlen=16)
        self._handles = count(0x7700)
        self._is_running = False
        self._functions = {name: self._exported(name) for name in dir(self) if name.startswith("cu")}

    # ---- as C calls it

    def address_of(self, name: str) -> int:
        if name in self.missing or name not in self._functions:
            return 0
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0

    def _exported(self, name: str) -> Any:
        """The method as a C function, by its annotations."""
        types = inspect.get_annotations(getattr(type(self), name), eval_str=True)
        made = types.pop("return")
        outs = made if isinstance(made, tuple) else () if made is None else (made,)

        def call(*arguments: Any) -> int:
            given = [each.bytes if isinstance(each, _ByValue) else each for each in arguments[len(outs) :]]
            status, found = self.answer(name, *given)
            for kind, pointer, value in zip(outs, arguments, found, strict=False):
                kind.from_address(pointer).value = value
            return status

        by_value = [_ByValue if each is HANDLE else each for each in types.values()]
        return ctypes.CFUNCTYPE(c_int, *[P] * len(outs), *by_value)(call)

    def answer(self, name: str, *arguments: Any) -> tuple[int, tuple[Any, ...]]:
        """Status, and what is written through pointers."""
        if name in OF_A_DEVICE:
            self.devices.add(self.device)
        status = self.statuses.get(name, self.broken)
        if status:
            return status, ()
        try:
            made = getattr(self, name)(*arguments)
        except Refused as refused:
            return refused.status, ()
        except Exception:  # the edge to C
            self.fault(LAUNCH_FAILED, traceback.format_exc())
            return LAUNCH_FAILED, ()
        return 0, made if isinstance(made, tuple) else (made,)

    def call(self, name: str, *arguments: Any) -> Any:
        """As CuPy's runtime. Raises `CUDARuntimeError`."""
        status, found = self.answer(name, *arguments)
        if status:
            raise CUDARuntimeError(status, name)
        return found[0]

    def fault(self, status: int, what: str) -> None:
        self.faults.append(what)
        self.broken = self.broken or status

    # ---- what time does

    def tick(self) -> bool:
        """A step of some stream. False where none can go on."""
        assert not self._is_running, "a kernel asks for progress"
        handles = [handle for handle, stream in self._streams.items() if stream.queue]
        self.random.shuffle(handles)
        for stream in map(self._streams.__getitem__, handles):
            went = stream.queue[0]()
            if went:
                stream.queue.popleft()
                stream.ended += 1
            if went is not False:
                return True
        return False

    def run_all(self) -> None:
        while self.tick():
            pass
        assert not any(stream.queue for stream in self._streams.values()), "streams wait for each other for ever"

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        while not self.broken and not is_done():
            assert self.tick(), "streams wait for each other for ever"
        if self.broken:
            raise Refused(self.broken)

    def push(self, handle: int, step: Callable[[], bool | None]) -> None:
        """The legacy stream waits for all blocking streams, and they for it."""
        stream = self._streams[handle]
        others = [each for each in self._streams.values() if each.is_blocking and each is not stream]
        awaited = others if handle == 0 else [self._streams[0]] if stream.is_blocking else []
        points = [(each, each.submitted) for each in awaited]
        if any(each.ended < point for each, point in points):
            stream.queue.append(lambda: all(each.ended >= point for each, point in points))
            stream.submitted += 1
        while len(stream.queue) >= DEPTH:
            assert self.tick(), "a full stream stands still"
        stream.queue.append(step)
        stream.submitted += 1

    def launch(self, handle: int, body: Callable[[], Any], pieces: int = 1) -> None:
        """A kernel: `body` is run in the last of so many steps."""
        self._work(handle, 1e3 * pieces, [body, *repeat(lambda: None, pieces - 1)])

    def _copy(self, handle: int, nanoseconds: float, parts: list[Callable[[], Any]]) -> None:
        """In any order."""
        self.random.shuffle(parts)
        self._work(handle, nanoseconds, parts)

    def _work(self, handle: int, nanoseconds: float, parts: list[Callable[[], Any]]) -> None:
        """A part in each step, the last one first."""
        share = nanoseconds / max(1, len(parts))

        def step() -> bool | None:
            if parts and not self.broken:
                self.now += share
                self._is_running = True
                try:
                    parts.pop()()
                except Refused as refused:
                    self.fault(refused.status, f"work of stream {handle}: CUDA error {refused.status}")
                except Exception:
                    self.fault(LAUNCH_FAILED, traceback.format_exc())
                finally:
                    self._is_running = False
            return not parts or bool(self.broken) or None

        self.push(handle, step)

    # ---- memory

    def adopt(self, array: Any) -> int:
        """The bytes of a NumPy array are the device's from now on; their address there."""
        self._memory[array.ctypes.data] = _Memory(array, array.nbytes)
        return int(array.ctypes.data) + ON_DEVICE

    def bytes_of(self, address: int) -> Any:
        """Of an allocation, as a NumPy array uint8 of all of it."""
        return np.frombuffer(self._memory[address - ON_DEVICE].bytes, np.uint8)

    def place(self, address: int, nbytes: int, *, by_kernel: bool = False) -> int:
        """Where these bytes are: of the device; of page-locked memory, which kernels know by its other address; copies
        reach all memory of this process. Raises `Refused`.
        """
        if address >= ON_DEVICE:
            real, ranges = address - ON_DEVICE, self._sizes(self._memory | self._mapped)
        elif by_kernel:
            real, ranges = address - SEEN_BY_KERNELS, self.registered.items()
        else:
            return address
        if _start_of(ranges, real, nbytes) is None:
            raise Refused(ILLEGAL)
        return real

    def _sizes(self, memory: dict[int, _Memory]) -> Iterable[tuple[int, int]]:
        return ((start, each.size) for start, each in memory.items())

    def is_locked(self, address: int, nbytes: int = 1) -> bool:
        return _start_of(self.registered.items(), address, nbytes) is not None

    def cuMemAlloc(self, nbytes: Z) -> P:
        file = os.memfd_create("fake-gpu")
        os.truncate(file, max(1, nbytes))
        return self._map(file, self._memory)

    def cuMemAllocAsync(self, nbytes: Z) -> P:
        """Of a pool of the driver's own, whose memory no handle names."""
        return self.adopt(np.zeros(nbytes, np.uint8))

    def _map(self, file: int, into: dict[int, _Memory]) -> int:
        mapped = mmap.mmap(file, os.fstat(file).st_size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        into[address] = _Memory(mapped, len(mapped), file)
        return address + ON_DEVICE

    def cuMemGetInfo(self) -> (Z, Z):
        return self.free_bytes, 2 * self.free_bytes

    def cuMemFree(self, address: P) -> None:
        """Nobody waits for the device; its pages stay, so that a late copy is a fault and no crash."""
        freed = self._memory.pop(address - ON_DEVICE, None)
        if freed is None:
            raise Refused(INVALID)
        self._freed.append(freed.bytes)
        os.close(freed.file)

    def cuMemHostRegister(self, address: P, nbytes: Z, flags: U) -> None:
        if self.is_locked(address):
            raise Refused(712)
        self.registered[address] = nbytes

    def cuMemHostUnregister(self, address: P) -> None:
        if self.registered.pop(address, None) is None:
            raise Refused(713)

    def cuMemHostGetDevicePointer(self, address: P, flags: U) -> P:
        if not self.is_locked(address):
            raise Refused(INVALID)
        return address + SEEN_BY_KERNELS

    # ---- copies

    def _row(self, to: int, of: int, nbytes: int) -> Callable[[], None]:
        """One row of a copy, as it was when it was submitted: a page that was locked then has to be when it runs. The
        source of what is not locked is read at once.
        """
        locked = [each for each in (to, of) if each < ON_DEVICE and self.is_locked(each, nbytes)]
        staged = ctypes.string_at(of, nbytes) if of < ON_DEVICE and of not in locked else None

        def run() -> None:
            places = [self.place(each, nbytes) for each in (to, of)]
            if not all(self.is_locked(each, nbytes) for each in locked):
                raise Refused(ILLEGAL)
            ctypes.memmove(places[0], places[1] if staged is None else staged, nbytes)

        return run

    def cuMemcpyAsync(self, to: P, of: P, nbytes: Z, stream: P) -> None:
        self.log.append(("copy", stream, to, of, nbytes))
        half = nbytes // 2  # in two pieces, so that somebody may see half of it
        parts = [self._row(to, of, half), self._row(to + half, of + half, nbytes - half)]
        self._copy(stream, self.copy_ns("spans", 1, nbytes), parts)

    cuMemcpyHtoDAsync = cuMemcpyAsync

    def cuMemcpy2DAsync(self, pointer: P, stream: P) -> None:
        fields = COPY_2D.unpack(ctypes.string_at(pointer, COPY_2D.size))
        (_, _, source_type, _, of, _, of_pitch), (_, _, target_type, _, to, _, to_pitch) = fields[:7], fields[7:14]
        width, height = fields[14:]
        assert (source_type, target_type) == (4, 4), "unified addresses"
        if not width <= min(of_pitch, to_pitch) <= max(of_pitch, to_pitch) < 1 << 31:
            raise Refused(INVALID)
        self.log.append(("copy 2D", stream, to, to_pitch, of, of_pitch, width, height))
        rows = [self._row(to + row * to_pitch, of + row * of_pitch, width) for row in range(height)]
        self._copy(stream, self.copy_ns("spans", height, width), rows)

    def cuMemcpyBatchAsync(
        self, to: P, of: P, sizes: P, count: Z, attributes: P, starts: P, num: Z, failed: P, stream: P
    ) -> None:
        targets, sources, lengths = ((c_uint64 * count).from_address(each) for each in (to, of, sizes))
        if not count or not num or stream == 0 or c_uint.from_address(attributes).value != 1:
            raise Refused(INVALID)
        assert c_size_t.from_address(starts).value == 0
        self.log.append(("batch", stream, count))
        rows = [self._row(*each) for each in zip(targets, sources, lengths, strict=True)]
        self._copy(stream, self.copy_ns("batch", count, max(lengths)), rows)

    # ---- the kernel

    def cuModuleLoadData(self, image: c_char_p) -> P:
        assert b".entry copy_cache_rows(" in image
        assert b".target sm_80" in image
        self.modules.add(module := next(self._handles))
        return module

    def cuModuleUnload(self, module: P) -> None:
        self.modules.remove(module)

    def cuModuleGetFunction(self, module: P, name: c_char_p) -> P:
        assert name == b"copy_cache_rows"
        return next(self._handles)

    def cuLaunchKernelEx(self, launch: P, function: P, parameters: P, extra: P) -> None:
        *shape, shared, stream, attributes, num = LAUNCH.unpack(ctypes.string_at(launch, LAUNCH.size))
        assert (shape, shared, attributes, num, extra or 0) == ([shape[0], 1, 1, shape[3] // 32 * 32, 1, 1], 0, 0, 0, 0)
        assert shape[0] > 0, "a launch has groups"
        assert 0 < shape[3] <= 1024, "the kernel's PTX has .maxntid 1024"
        given = c_uint64.from_address(parameters).value
        arguments = Arguments.from_buffer_copy(ctypes.string_at(given, ctypes.sizeof(Arguments)))
        rows = arguments.first_row, arguments.end_row
        self.log.append(("kernel", stream, *rows, arguments.num_blocks, (shape[0], shape[3])))
        ends = [*range(*rows)]
        width = int(self._table(arguments.rows + ends[0] * ROW.itemsize, ROW, 1)[0]["bytes"])
        nanoseconds = self.copy_ns("kernel", arguments.num_blocks * len(ends), width)
        self._copy(stream, nanoseconds, [lambda row=row: self._kernel_row(arguments, row) for row in ends])

    def _kernel_row(self, arguments: Arguments, number: int) -> None:
        """All blocks of one row; what it reads of its tables, it reads now."""
        (row,) = self._table(arguments.rows + number * ROW.itemsize, ROW, 1)
        spans = self._table(arguments.spans, np.dtype("3i4"), arguments.num_spans).tolist()
        if any(int(row[name]) % int(row["unit"]) for name in ("device", "host", "dp", "hp", "bytes")):
            raise Refused(MISALIGNED)
        sides = [(int(row["device"]), int(row["dp"])), (int(row["host"]), int(row["hp"]))]
        sides = sides if arguments.to_device else sides[::-1]
        ends = [*(first for _, _, first in spans[1:]), arguments.num_blocks]
        for (source, target, first), end in zip(spans, ends, strict=True):
            to, of = (
                self._rows_of(place + slot * pitch, end - first, int(row["bytes"]), pitch)
                for (place, pitch), slot in zip(sides, (target, source), strict=True)
            )
            to[:] = of

    def _table(self, address: int, of: np.dtype, length: int) -> Any:
        nbytes = of.itemsize * length
        return np.frombuffer(ctypes.string_at(self.place(address, nbytes, by_kernel=True), nbytes), of)

    def _rows_of(self, address: int, blocks: int, nbytes: int, pitch: int) -> Any:
        span = (blocks - 1) * pitch + nbytes
        place = self.place(address, span, by_kernel=True)
        flat = np.frombuffer((ctypes.c_uint8 * span).from_address(place), np.uint8)
        return np.lib.stride_tricks.as_strided(flat, (blocks, nbytes), (pitch, 1))

    # ---- streams and events

    def cuStreamCreate(self, flags: U) -> P:
        handle = next(self._handles)
        self._streams[handle] = _Stream(flags == 0)
        self.log.append(("stream", handle, "non-blocking" if flags else "blocking"))
        return handle

    def cuStreamWaitEvent(self, stream: P, event: P, flags: U) -> None:
        self.log.append(("wait", stream, event))
        awaited, point = self._events[event], self._events[event].recorded
        self.push(stream, lambda: awaited.ended >= point)

    def cuStreamSynchronize(self, stream: P) -> None:
        self._run_until(lambda: not self._streams[stream].queue)

    def cuEventCreate(self, flags: U) -> P:
        handle = next(self._handles)
        self._events[handle] = _Event(flags & 2 == 0)
        return handle

    def cuEventRecord(self, event: P, stream: P) -> None:
        made = self._events[event]
        self.log.append(("record", stream, event, "timed" if made.is_timed else "untimed"))
        made.recorded += 1
        point = made.recorded

        def step() -> bool:
            made.ended, made.time = max(made.ended, point), self.now
            return True

        self.push(stream, step)

    def cuEventQuery(self, event: P) -> None:
        for _ in range(self.random.randrange(4) if self.progress_on_query else 0):
            self.tick()
        if self.broken or self._events[event].ended < self._events[event].recorded:
            raise Refused(self.broken or NOT_READY)

    def cuEventElapsedTime(self, start: P, end: P) -> c_float:
        assert self._events[start].is_timed
        assert self._events[end].is_timed
        return (self._events[end].time - self._events[start].time) / 1e6

    # ---- GPUs and other processes

    def cuDriverGetVersion(self) -> N:
        return 12080

    def cuDeviceGet(self, ordinal: N) -> N:
        return 100 + ordinal

    def cuDeviceGetCount(self) -> N:
        return 1

    def cuDeviceGetUuid(self, gpu: N) -> UUID_BYTES:
        return UUID

    def cuPointerGetAttribute(self, attribute: N, address: P) -> N:
        assert attribute == 9, "the GPU's number"
        self.place(address, 1, by_kernel=True)
        return 0

    def cuMemGetAddressRange(self, address: P) -> (P, Z):
        """Of memory that other processes can map."""
        start = _start_of(self._sizes(self._memory), address - ON_DEVICE)
        if start is None or self._memory[start].file < 0:
            raise Refused(INVALID)
        return start + ON_DEVICE, self._memory[start].size

    def cuIpcGetMemHandle(self, address: P) -> HANDLE:
        start, _size = self.cuMemGetAddressRange(address)
        return struct.pack("64s", f"/proc/{os.getpid()}/fd/{self._memory[start - ON_DEVICE].file}".encode())

    def cuIpcOpenMemHandle(self, handle: HANDLE, flags: U) -> P:
        assert flags == 1, "peer access"
        try:
            file = os.open(handle.rstrip(b"\0").decode(), os.O_RDWR)
        except OSError:
            raise Refused(INVALID) from None
        return self._map(file, self._mapped)

    def cuIpcCloseMemHandle(self, address: P) -> None:
        os.close(self._mapped.pop(address - ON_DEVICE).file)


current = FakeGpu(int(os.environ.get("FAKE_GPU_SEED", "0")))
"""The one that `cupy` stands over."""
