"""The CUDA driver by ctypes: functions that CuPy lacks, and calls that keep the interpreter lock.

Beside a busy Python thread, a call that releases the lock gets it back after milliseconds. Calls per layer keep it
(`keeping_lock`): they enqueue and return in microseconds while the stream's queue has room (see `runtime.py`).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from functools import cache
from typing import Any, Protocol

from ...contract.installation import needed_by
from ...errors import ConfigError, TransferError

VERSION = 12080
"""Requested version of functions: cuMemcpyBatchAsync has another signature in CUDA 13."""
UUID_BYTES = 16


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", c_uint8 * 64),)


_SIGNATURES: dict[str, list[Any]] = {
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuLaunchKernelEx": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cuMemHostGetDevicePointer": [POINTER(c_uint64), c_void_p, c_uint],
    "cuMemcpyHtoDAsync": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemcpy2DAsync": [c_void_p, c_void_p],
    "cuMemcpyBatchAsync": [*[c_void_p] * 3, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuMemGetAddressRange": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
    "cuIpcGetMemHandle": [c_void_p, c_uint64],
    "cuIpcOpenMemHandle": [POINTER(c_uint64), IpcHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGetUuid": [c_void_p, c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
}
"""Parameters as in `cuda.h`; each function returns a CUresult."""


def address_of(name: str) -> int:
    """Address of the driver's function `name`, 0 if it has none. Raises `ConfigError` without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        ask = library.cuGetProcAddress_v2 if hasattr(library, "cuGetProcAddress_v2") else library.cuGetProcAddress
    except (OSError, AttributeError) as error:
        raise ConfigError(f"got no CUDA driver ({error}), expected 11.8 or later: install the NVIDIA driver") from None
    found, status = c_void_p(), c_int()
    more = (byref(status),) if ask.__name__.endswith("_v2") else ()
    ask(name.encode(), byref(found), VERSION, c_uint64(0), *more)
    return found.value or 0


class DriverStream(Protocol):
    """A raw CUDA stream."""

    handle: int

    def call(self, name: str, *arguments: object, copies: int = 1) -> None:
        """Call the driver's function `name`, which enqueues `copies` copies. Raises `TransferError`."""

    def record_event(self) -> Any: ...


class Driver:
    """Functions by name, called with the interpreter lock or without it. Thread-safe.

    A call raises `TransferError` for a CUresult other than success, `ConfigError` for a function that this driver
    lacks. Except queries of devices, calls need a current context on the calling thread.
    """

    def __init__(self, find: Callable[[str], int]) -> None:
        self.keeping_lock = _Functions(find, ctypes.PYFUNCTYPE)
        self.giving_lock = _Functions(find, ctypes.CFUNCTYPE)

    def call(self, name: str, *arguments: object) -> None:
        if code := self.giving_lock[name](*arguments):
            raise TransferError(f"{name}: CUDA error {code}")


class _Functions(dict[str, Any]):
    def __init__(self, find: Callable[[str], int], make: Any) -> None:
        super().__init__()
        self._find, self._make = find, make

    def __missing__(self, name: str) -> Any:
        if not (address := self._find(name)):
            raise ConfigError(f"this CUDA driver has no {name}: install a newer one")
        self[name] = self._make(c_int, *_SIGNATURES[name])(address)
        return self[name]


@cache
def driver() -> Driver:
    return Driver(lambda name: address_of(name))


def cuda_of_driver() -> int:
    """Major version of CUDA that the driver supports; 0 without a driver."""
    version = c_int()
    with suppress(ConfigError):
        driver().call("cuDriverGetVersion", byref(version))
    return version.value // 1000


def load_cupy() -> Any:
    """Import cupy. Raises `ConfigError` with the extra that fits the driver."""
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError:
        with needed_by("a server on a GPU", "gpu-cuda13" if cuda_of_driver() >= 13 else "gpu"):
            raise


def uuid_of(device: int) -> bytes:
    """UUID (16 bytes) of this process's GPU `device`. Raises as `Driver.call`."""
    gpu, uuid = c_int(), (c_uint8 * UUID_BYTES)()
    driver().call("cuDeviceGet", byref(gpu), device)
    driver().call("cuDeviceGetUuid", uuid, gpu)
    return bytes(uuid)
