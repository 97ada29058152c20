"""`cupy.cuda.runtime` over the fake driver."""

from __future__ import annotations

from functools import partial
from typing import Any

from fake_driver import UUID, CUDARuntimeError
from fake_driver import current as gpu

__all__ = ["CUDARuntimeError"]

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4

malloc = partial(gpu.call, "cuMemAlloc")
hostRegister = partial(gpu.call, "cuMemHostRegister")
hostUnregister = partial(gpu.call, "cuMemHostUnregister")
streamSynchronize = partial(gpu.call, "cuStreamSynchronize")
runtimeGetVersion = driverGetVersion = partial(gpu.call, "cuDriverGetVersion")


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    gpu.call("cuMemcpyAsync", dst, src, size, stream)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """May return before the last bytes have arrived."""
    gpu.call("cuMemcpyAsync", dst, src, size, 0)


def eventQuery(event: int) -> int:
    """CuPy returns the status of this one, whatever it is."""
    return gpu.answer("cuEventQuery", event)[0]


def mallocAsync(size: int, stream: int) -> int:
    return gpu.call("cuMemAllocAsync", size)


def free(ptr: int) -> None:
    """Waits for the device, as cudaFree."""
    deviceSynchronize()
    gpu.call("cuMemFree", ptr)


def deviceSynchronize() -> None:
    gpu.run_all()
    gpu.call("cuStreamSynchronize", 0)


def deviceGetAttribute(attrib: int, device: int) -> int:
    return {16: 16, 20: gpu.compute_mode}[attrib]


def getDeviceCount() -> int:
    return 1


def deviceGetPCIBusId(device: int) -> str:
    return f"0000:A{device}:00.0"


def memGetInfo() -> tuple[int, int]:
    return gpu.free_bytes, 2 * gpu.free_bytes


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {"name": b"the fake GPU", "multiProcessorCount": 16, "major": 9, "minor": 0, "uuid": UUID}
