"""Host memory of the host tier: one mapping, on huge pages if available."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from ...errors import CacheStateError
from .rows import ByteRows


class HostBuffer:
    """`nbytes` of zeroed, page-aligned host memory. Not thread-safe.

    `free()` drops this object's reference; the memory lives until its last view is gone, so no view dangles. Freeing
    twice raises `CacheStateError`.
    """

    def __init__(self, memory: mmap.mmap, file: int | None = None) -> None:
        self.file = file
        """Owned descriptor that other processes can map; None for private memory."""
        self._memory: mmap.mmap | None = memory

    @property
    def array(self) -> ByteRows:
        """uint8 view `[nbytes]`."""
        if self._memory is None:
            raise CacheStateError("this host buffer has been freed")
        return np.frombuffer(self._memory, np.uint8)

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.array.size

    def keep_to_this_process(self) -> None:
        """Exclude page-locked memory from forked children and core dumps, best effort.

        Otherwise a fork copies every page that a GPU may write to. A forked child must not touch the memory.
        """
        assert self._memory is not None
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            with contextlib.suppress(OSError):
                self._memory.madvise(advice)

    def free(self) -> None:
        self.array  # noqa: B018  raises on a double free
        self._memory = None
        if self.file is not None:
            os.close(self.file)


def host_alloc(nbytes: int, *, shared: bool = False) -> HostBuffer:
    """Allocate host memory, whose pages come at first touch. `shared`: other processes can map `HostBuffer.file`.

    Raises `MemoryError` if the system refuses, `CacheStateError` for `nbytes < 1`.
    """
    if nbytes < 1:
        raise CacheStateError(f"a host buffer needs at least one byte, got {nbytes}")
    file = os.memfd_create("kvcache-host") if shared else -1
    try:
        if shared:
            os.truncate(file, nbytes)
        # Otherwise private: a shared anonymous mapping is a shmem file, which huge pages usually skip.
        memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if shared:
            os.close(file)
        raise MemoryError(f"the system refused {nbytes} bytes of host memory: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return HostBuffer(memory, file if shared else None)
