"""`cupy.cuda.runtime` over the fake driver."""

from __future__ import annotations

import ctypes
from typing import Any

from .. import driver
from ..driver import CUDARuntimeError

__all__ = ["CUDARuntimeError"]

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4

FREE_BYTES = 1 << 28
"""Of device memory. Little, so that the suite's host pools, sized by it, are small."""


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        *((f"source_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_uint64),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_uint64),
        ("source_pitch", ctypes.c_size_t),
        *((f"target_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_uint64),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_uint64),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


def memcpyAsync(to: int, of: int, size: int, kind: int, stream: int) -> None:
    driver.call("cuMemcpyAsync", to, of, size, stream)


def memcpy2DAsync(
    to: int, to_pitch: int, of: int, of_pitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    copy = _Memcpy2D(source_pitch=of_pitch, target_pitch=to_pitch, width=width, height=height)
    copy.source_type, copy.target_type = (1, 2) if kind == memcpyHostToDevice else (2, 1)
    if kind == memcpyHostToDevice:
        copy.source_host, copy.target_device = of, to
    else:
        copy.source_device, copy.target_host = of, to
    driver.call("cuMemcpy2DAsync", ctypes.byref(copy), stream)


def eventQuery(event: int) -> int:
    """CuPy returns the status of this one, whatever it is."""
    return driver.status_of("cuEventQuery", event)


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    driver.call("cuStreamWaitEvent", stream, event, ctypes.c_uint(flags))


def streamSynchronize(stream: int) -> None:
    driver.call("cuStreamSynchronize", stream)


def eventRecord(event: int, stream: int) -> None:
    driver.call("cuEventRecord", event, stream)


def malloc(nbytes: int) -> int:
    return driver.new_handle("cuMemAlloc", nbytes)


def mallocAsync(nbytes: int, stream: int) -> int:
    """No memory of this pool can be exported."""
    return driver.new_handle("cuMemAllocAsync", nbytes, stream)


def free(address: int) -> None:
    """Waits for the device, as cudaFree."""
    deviceSynchronize()
    driver.call("cuMemFree", address)


def deviceSynchronize() -> None:
    driver.library.fake_run_all()
    driver.call("cuStreamSynchronize", 0)


def hostRegister(address: int, size: int, flags: int) -> None:
    driver.call("cuMemHostRegister", address, size, ctypes.c_uint(flags))


def hostUnregister(address: int) -> None:
    driver.call("cuMemHostUnregister", address)


def deviceGetAttribute(attribute: int, device: int) -> int:
    found = ctypes.c_int()
    driver.call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(attribute), ctypes.c_int(device))
    return found.value


def driverGetVersion() -> int:
    found = ctypes.c_int()
    driver.call("cuDriverGetVersion", ctypes.byref(found))
    return found.value


runtimeGetVersion = driverGetVersion


def getDeviceCount() -> int:
    return 1


def deviceGetPCIBusId(device: int) -> str:
    return f"0000:A{device}:00.0"


def memGetInfo() -> tuple[int, int]:
    return FREE_BYTES, 2 * FREE_BYTES


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {"name": b"the fake GPU", "multiProcessorCount": 16, "major": 9, "minor": 0}
