"""`cupy.cuda.runtime` over the fake driver."""

from __future__ import annotations

from typing import Any

from fake_driver import CUDARuntimeError
from fake_driver import current as gpu

__all__ = ["CUDARuntimeError"]

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    gpu.call("cuMemcpyAsync", dst, src, size, stream)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """May return before the last bytes have arrived."""
    gpu.call("cuMemcpyAsync", dst, src, size, 0)


def eventQuery(event: int) -> int:
    """CuPy returns the status of this one, whatever it is."""
    return gpu.answer("cuEventQuery", event)[0]


def streamSynchronize(stream: int) -> None:
    gpu.call("cuStreamSynchronize", stream)


def malloc(size: int) -> int:
    return gpu.call("cuMemAlloc", size)


def mallocAsync(size: int, stream: int) -> int:
    """No memory of this pool can be exported."""
    return gpu.call("cuMemAllocAsync", size)


def free(ptr: int) -> None:
    """Waits for the device, as cudaFree."""
    deviceSynchronize()
    gpu.call("cuMemFree", ptr)


def deviceSynchronize() -> None:
    gpu.run_all()
    gpu.call("cuStreamSynchronize", 0)


def hostRegister(ptr: int, size: int, flags: int) -> None:
    gpu.call("cuMemHostRegister", ptr, size, flags)


def hostUnregister(ptr: int) -> None:
    gpu.call("cuMemHostUnregister", ptr)


def deviceGetAttribute(attrib: int, device: int) -> int:
    return {16: 16, 20: gpu.compute_mode}[attrib]


def driverGetVersion() -> int:
    return gpu.call("cuDriverGetVersion")


runtimeGetVersion = driverGetVersion


def getDeviceCount() -> int:
    return 1


def deviceGetPCIBusId(device: int) -> str:
    return f"0000:A{device}:00.0"


def memGetInfo() -> tuple[int, int]:
    return gpu.free_bytes, 2 * gpu.free_bytes


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {"name": b"the fake GPU", "multiProcessorCount": 16, "major": 9, "minor": 0, "uuid": b"\x01" * 16}
