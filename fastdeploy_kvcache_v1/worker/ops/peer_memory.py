"""GPU memory of other processes on this machine (CUDA IPC), through the compiled core."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .compiled import Path
from .library import Library

__all__ = ["HANDLE_BYTES", "UUID_BYTES", "Allocation", "Gpu", "PeerMemory"]

HANDLE_BYTES = 64
UUID_BYTES = 16


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


class _Exported(ctypes.Structure):
    """`kvswap_ipc_memory`."""

    _fields_ = (
        ("handle", ctypes.c_uint8 * HANDLE_BYTES),
        ("base", ctypes.c_uint64),
        ("num_bytes", ctypes.c_int64),
    )


class PeerMemory:
    """Thread-safe. All but `gpu_of` need a CUDA context that is current on the calling thread.

    Every method raises `ConfigError` for what this machine, driver or memory cannot do, and `TransferError` when CUDA
    fails.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def export(self, address: int) -> Allocation:
        """The allocation around `address`, for other processes; it must stay until they have closed it."""
        made = _Exported()
        self._library.call("kvswap_cuda_ipc_export", address, ctypes.byref(made))
        return Allocation(bytes(made.handle), made.base, made.num_bytes)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns where it begins in this one."""
        assert len(handle) == HANDLE_BYTES, f"a handle has {HANDLE_BYTES} bytes, got {len(handle)}"
        base = ctypes.c_uint64()
        self._library.call("kvswap_cuda_ipc_open", handle, ctypes.byref(base))
        return base.value

    def close(self, base: int) -> None:
        """As often as it was opened. Copies from it must have run."""
        self._library.call("kvswap_cuda_ipc_close", base)

    def gpu_of(self, address: int) -> Gpu:
        """Whose memory is at `address`."""
        number, uuid = ctypes.c_int(), (ctypes.c_uint8 * UUID_BYTES)()
        self._library.call("kvswap_cuda_device_of", address, ctypes.byref(number), uuid)
        return Gpu(number.value, bytes(uuid))

    def reaches(self, number: int, uuid: bytes) -> bool | None:
        """Whether GPU `number` reads the memory of GPU `uuid`; None when this process does not see that one."""
        access = ctypes.c_int()
        self._library.call("kvswap_cuda_reaches", number, uuid, ctypes.byref(access))
        return None if access.value < 0 else bool(access.value)

    def copy(self, ranges: npt.NDArray[np.int64], path: Path = Path.AUTO, *, stream: int) -> None:
        """Enqueue copies inside device memory on the raw `stream`: int64 `[ranges, 3]`, C-contiguous, source address,
        target address, bytes. In any order; raises `CacheStateError`, nothing copied, for a byte that is written twice,
        or read and written.
        """
        assert ranges.dtype == np.int64
        assert ranges.flags.c_contiguous
        self._library.call("kvswap_cuda_copy_ranges", ranges.ctypes.data, len(ranges), int(path), stream)
