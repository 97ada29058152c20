"""A stand-in for the part of CuPy that this package and its GPU suite use, over the fake driver.

Who imports it has the fake driver in place of libcuda, too. An array is NumPy's, over the bytes of the device: only
what takes its turn on a stream is its own. A kernel is its NumPy twin.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_driver import ON_DEVICE, UUID, CUDARuntimeError
from fake_driver import current as gpu

from fastdeploy_kvcache_v1.worker.cuda import driver

driver.address_of = gpu.address_of
driver.driver.cache_clear()

__version__ = "14.0.0"

uint8, float16, float32 = np.uint8, np.float16, np.float32
cublas = SimpleNamespace()

_current: list[_AnyStream] = []


class _AnyStream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __enter__(self) -> Any:
        _current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.pop()

    def synchronize(self) -> None:
        gpu.call("cuStreamSynchronize", self.ptr)

    def record(self) -> _Event:
        event = _Event()
        gpu.call("cuEventRecord", event.ptr, self.ptr)
        return event


def _stream() -> int:
    """The current one."""
    return _current[-1].ptr if _current else 0


class _Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.ptr = gpu.call("cuEventCreate", 2 if disable_timing else 0)

    @property
    def done(self) -> bool:
        return _query(self.ptr) == 0


class _Pinned:
    """Page-locked memory, given back with the last reference to it."""

    def __init__(self, size: int) -> None:
        self._bytes = (ctypes.c_uint8 * size)()
        self.ptr = ctypes.addressof(self._bytes)
        gpu.call("cuMemHostRegister", self.ptr, size, 0)
        weakref.finalize(self, gpu.answer, "cuMemHostUnregister", self.ptr).atexit = False


class _Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = gpu.device if device is None else device

    def use(self) -> None:
        gpu.device = self.id

    def synchronize(self) -> None:
        gpu.run_all()
        gpu.call("cuStreamSynchronize", 0)


def _query(event: int) -> int:
    """CuPy returns the status of this one, whatever it is."""
    return gpu.answer("cuEventQuery", event)[0]


def _free(ptr: int) -> None:
    """Waits for the device, as cudaFree."""
    _Device().synchronize()
    gpu.call("cuMemFree", ptr)


runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    memcpyHostToDevice=1,
    memcpyDefault=4,
    cudaDevAttrMultiProcessorCount=16,
    cudaDevAttrComputeMode=20,
    malloc=partial(gpu.call, "cuMemAlloc"),
    mallocAsync=lambda size, stream: gpu.call("cuMemAllocAsync", size),
    free=_free,
    memcpyAsync=lambda dst, src, size, kind, stream: gpu.call("cuMemcpyAsync", dst, src, size, stream),
    memcpy=lambda dst, src, size, kind: gpu.call("cuMemcpyAsync", dst, src, size, 0),  # may return before it arrived
    hostRegister=partial(gpu.call, "cuMemHostRegister"),
    hostUnregister=partial(gpu.call, "cuMemHostUnregister"),
    streamSynchronize=partial(gpu.call, "cuStreamSynchronize"),
    eventQuery=_query,
    runtimeGetVersion=partial(gpu.call, "cuDriverGetVersion"),
    driverGetVersion=partial(gpu.call, "cuDriverGetVersion"),
    getDeviceCount=lambda: 1,
    deviceGetAttribute=lambda attribute, device: {16: 7, 20: gpu.compute_mode}[attribute],
    deviceGetPCIBusId=lambda device: f"0000:A{device}:00.0",
    memGetInfo=lambda: gpu.answer("cuMemGetInfo")[1],
    getDeviceProperties=lambda device: {
        "name": b"the fake GPU",
        "multiProcessorCount": 7,
        "major": 9,
        "minor": 0,
        "uuid": UUID,
    },
)
cuda = SimpleNamespace(
    runtime=runtime,
    Device=_Device,
    Event=_Event,
    ExternalStream=_AnyStream,
    Stream=lambda non_blocking=False: _AnyStream(gpu.call("cuStreamCreate", int(non_blocking))),
    alloc_pinned_memory=_Pinned,
    get_elapsed_time=lambda start, end: gpu.call("cuEventElapsedTime", start.ptr, end.ptr),
)


class ndarray(np.ndarray):
    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data + ON_DEVICE)

    def fill(self, value: Any) -> None:
        gpu.launch(_stream(), partial(self.view(np.ndarray).fill, value))

    def set(self, array: np.ndarray) -> None:
        """From pageable memory, on the current stream."""
        source = np.ascontiguousarray(array, self.dtype)
        assert source.shape == self.shape
        if source.nbytes:
            gpu.call("cuMemcpyAsync", self.data.ptr, source.ctypes.data, source.nbytes, _stream())

    def get(self) -> np.ndarray:
        """After the current stream; other streams are not waited for."""
        gpu.call("cuStreamSynchronize", _stream())
        return np.array(self)


def empty(shape: Any, dtype: Any = np.float32) -> ndarray:
    """Given back with the last view of it, without waiting for the device."""
    nbytes = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
    address = gpu.call("cuMemAlloc", max(1, nbytes))
    memory = gpu.bytes_of(address)
    weakref.finalize(memory, gpu.answer, "cuMemFree", address).atexit = False
    return memory[:nbytes].view(dtype).reshape(shape).view(ndarray)


def full(shape: Any, value: Any, dtype: Any = np.float32) -> ndarray:
    made = empty(shape, dtype)
    made.fill(value)
    return made


def zeros(shape: Any, dtype: Any = np.float32) -> ndarray:
    return full(shape, 0, dtype)


def asarray(array: Any) -> ndarray:
    made = empty(np.shape(array), np.asarray(array).dtype)
    made.set(array)
    return made


asnumpy = ndarray.get


def matmul(left: ndarray, right: ndarray, out: ndarray) -> None:
    gpu.launch(_stream(), partial(np.matmul, *(each.view(np.ndarray) for each in (left, right, out))))


class RawKernel:
    """The NumPy twin of a kernel: `kernels.TWINS` has it under the same name."""

    def __init__(self, code: str, name: str) -> None:
        from kernels import TWINS

        assert f"void {name}(" in code
        self._body: Callable[..., None] = TWINS[name]

    def compile(self) -> None:
        pass

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        assert math.prod(block) <= 1024, "a block has 1,024 threads at most"
        given = [each.view(np.ndarray) if isinstance(each, ndarray) else each for each in args]
        gpu.launch(_stream(), partial(self._body, *given), pieces=2)
