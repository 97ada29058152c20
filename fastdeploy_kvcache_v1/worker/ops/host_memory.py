"""Host memory for the host tier: one anonymous private mapping, on huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from ...errors import CacheStateError
from .rows import ByteRows

Memory = mmap.mmap | ctypes.Array[ctypes.c_uint8]


class HostBuffer:
    """`nbytes` of zeroed, page-aligned host memory. Not thread-safe.

    `free()` gives up this object's hold; the memory itself goes when the last view of it has gone too, so a view can
    never dangle. Freeing twice raises `CacheStateError`.
    """

    def __init__(self, memory: Memory, file: int | None = None) -> None:
        """`memory` owns the bytes and goes with the last reference to it. `file`: descriptor of what it maps; owned."""
        self.file = file
        """Other processes map this, and have the same bytes. None for memory of this process alone."""
        self._array: ByteRows | None = np.frombuffer(memoryview(memory), dtype=np.uint8)

    @property
    def array(self) -> ByteRows:
        """uint8 view `[nbytes]`."""
        if self._array is None:
            raise CacheStateError("this host buffer has been freed")
        return self._array

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.array.size

    def free(self) -> None:
        self.array  # noqa: B018  raises on a double free
        self._array = None
        if self.file is not None:
            os.close(self.file)


def host_alloc(nbytes: int) -> HostBuffer:
    """Raises `MemoryError` where the system refuses, `CacheStateError` for `nbytes < 1`. Pages come at first touch, on
    the node of who touches them.
    """
    if nbytes < 1:
        raise CacheStateError(f"a host buffer needs at least one byte, got {nbytes}")
    try:
        # Private, because a shared anonymous mapping is a shmem file, which transparent huge pages usually skip.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refused {nbytes} bytes of host memory: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages answers EINVAL; small pages work as well
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return HostBuffer(mapping)


def host_alloc_shared(nbytes: int) -> HostBuffer:
    """Memory that other processes can map, see `HostBuffer.file`. Raises as `host_alloc`."""
    if nbytes < 1:
        raise CacheStateError(f"a host buffer needs at least one byte, got {nbytes}")
    file = os.memfd_create("kvcache-host")
    try:
        os.truncate(file, nbytes)
        return HostBuffer(mmap.mmap(file, nbytes), file)
    except OSError as error:
        os.close(file)
        raise MemoryError(f"the system refused {nbytes} bytes of shared host memory: {error}") from error


def keep_to_this_process(buffer: HostBuffer) -> None:
    """Leave `buffer` out of forked children and of core dumps, best effort.

    For page-locked memory: a fork would have the kernel copy every page that a GPU may write to, and a dump would be
    as large as the pool. Other processes that need the bytes map `buffer.file`; a forked child must not touch them.
    """
    libc = ctypes.CDLL(None)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        libc.madvise(ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.nbytes), advice)
