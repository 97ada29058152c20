"""GPU memory of other processes on this machine (CUDA IPC), through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint64
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CacheStateError, ConfigError, TransferError
from ..worker.cuda.copies import copy_2d, copy_batch
from ..worker.cuda.driver import UUID_BYTES, DriverStream, IpcHandle, driver, uuid_of

__all__ = ["HANDLE_BYTES", "UUID_BYTES", "Allocation", "Gpu", "PeerMemory"]

HANDLE_BYTES = ctypes.sizeof(IpcHandle)

_ORDINAL = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL."""

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""

_MOST_PITCH = (1 << 31) - 1
"""Bytes between two rows that one copy may have."""


class Gpu(NamedTuple):
    """A GPU as this process counts it, and the 16 bytes that name it in every process."""

    number: int
    uuid: bytes


class Allocation(NamedTuple):
    """What another process needs to map an allocation of this one. Who has `handle` may read and write all of it."""

    handle: bytes
    """`HANDLE_BYTES` of them."""
    base: int
    """Where it begins, in this process."""
    num_bytes: int


class PeerMemory:
    """Thread-safe. All but `gpu_of` need a CUDA context that is current on the calling thread.

    Every method raises `ConfigError` for what this machine, driver or memory cannot do, and `TransferError` when CUDA
    fails.
    """

    def export(self, address: int) -> Allocation:
        """The allocation around `address`, for other processes; it must stay until they have closed it."""
        base, nbytes, handle = c_uint64(), c_size_t(), IpcHandle()
        try:
            driver().call("cuMemGetAddressRange", byref(base), byref(nbytes), address)
            driver().call("cuIpcGetMemHandle", byref(handle), base)
        except TransferError as error:
            raise ConfigError(f"this GPU memory cannot be shared with another process ({error})") from None
        return Allocation(bytes(handle.bytes), base.value, nbytes.value)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns where it begins in this one."""
        assert len(handle) == HANDLE_BYTES, f"a handle has {HANDLE_BYTES} bytes, got {len(handle)}"
        base = c_uint64()
        mapped = IpcHandle.from_buffer_copy(handle)
        driver().call("cuIpcOpenMemHandle", byref(base), mapped, _LAZY_PEER_ACCESS)
        return base.value

    def close(self, base: int) -> None:
        """As often as it was opened. Copies from it must have run."""
        driver().call("cuIpcCloseMemHandle", base)

    def gpu_of(self, address: int) -> Gpu:
        """Whose memory is at `address`."""
        number = c_int()
        driver().call("cuPointerGetAttribute", byref(number), _ORDINAL, address)
        return Gpu(number.value, uuid_of(number.value))

    def reaches(self, number: int, uuid: bytes) -> bool | None:
        """Whether GPU `number` reads the memory of GPU `uuid`; None when this process does not see that one."""
        own, count, other, can = c_int(), c_int(), c_int(), c_int()
        driver().call("cuDeviceGetCount", byref(count))
        driver().call("cuDeviceGet", byref(own), number)
        for ordinal in range(count.value):
            if uuid_of(ordinal) != uuid:
                continue
            driver().call("cuDeviceGet", byref(other), ordinal)
            if other.value != own.value:
                driver().call("cuDeviceCanAccessPeer", byref(can), own, other)
            return other.value == own.value or bool(can.value)
        return None

    def copy(self, stream: DriverStream, ranges: npt.NDArray[np.int64], *, by_batch: bool) -> None:
        """Enqueue copies inside device memory: int64 `[ranges, 3]`, source address, target address, bytes. In any
        order; raises `CacheStateError`, nothing copied, for a byte that is written twice, or read and written.
        `by_batch`: where the driver's batch call is known to work.
        """
        _require_apart(ranges)
        grids = list(_grids(ranges))
        if by_batch and len(grids) > 1:
            sources, targets, sizes = (np.ascontiguousarray(part, np.uint64) for part in ranges.T)
            copy_batch(stream, targets, sources, sizes)
            return
        for first, count in grids:
            _copy_grid(stream, ranges[first : first + count])


def _require_apart(ranges: npt.NDArray[np.int64]) -> None:
    if not len(ranges):
        return
    written = ranges[np.argsort(ranges[:, 1])]
    firsts, ends = written[:, 1], written[:, 1] + written[:, 2]
    if (firsts[1:] < ends[:-1]).any():
        raise CacheStateError("two of the ranges write the same memory")
    before = np.searchsorted(firsts, ranges[:, 0] + ranges[:, 2])  # so many written ranges begin before its end
    if ((before > 0) & (ends[before - 1] > ranges[:, 0])).any():
        raise CacheStateError("a range reads what another one writes")


def _grids(ranges: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """First and number of ranges of one length at equal distances, which one copy can do."""
    first = 0
    steps = np.diff(ranges[:, :2], axis=0)
    while first < len(ranges):
        end = first + 1
        while end < len(ranges) and _continues(ranges, steps, first, end):
            end += 1
        yield first, end - first
        first = end


def _continues(ranges: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], first: int, end: int) -> bool:
    width, step = ranges[first, 2], steps[first]
    fits = (step >= width).all() and (step <= _MOST_PITCH).all()
    return bool(fits and ranges[end, 2] == width and (steps[end - 1] == step).all())


def _copy_grid(stream: DriverStream, ranges: npt.NDArray[np.int64]) -> None:
    source, target, width = ranges[0].tolist()
    if len(ranges) == 1:
        stream.call("cuMemcpyAsync", target, source, width, stream.handle)
        return
    source_pitch, target_pitch = (ranges[1, :2] - ranges[0, :2]).tolist()
    copy_2d(stream, source, source_pitch, target, target_pitch, width, len(ranges))
