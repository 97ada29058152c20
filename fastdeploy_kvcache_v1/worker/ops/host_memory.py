"""Host memory for the host tier: one mapping, on huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from ...errors import CacheStateError
from .rows import ByteRows


class HostBuffer:
    """`nbytes` of zeroed, page-aligned host memory. Not thread-safe.

    `free()` gives up this object's hold; the memory itself goes when the last view of it has gone too, so a view can
    never dangle. Freeing twice raises `CacheStateError`.
    """

    def __init__(self, memory: mmap.mmap, file: int | None = None) -> None:
        """`memory` goes with the last reference to it. `file`: descriptor of what it maps; owned."""
        self.file = file
        """Other processes map this, and have the same bytes. None for memory of this process alone."""
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
        """Leave it out of forked children and of core dumps, best effort.

        For page-locked memory: a fork would have the kernel copy every page that a GPU may write to, and a dump would
        be as large as the pool. Other processes that need the bytes map `file`; a forked child must not touch them.
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
    """Raises `MemoryError` where the system refuses, `CacheStateError` for `nbytes < 1`. Pages come at first touch, on
    the node of who touches them. `shared`: memory that other processes can map, see `HostBuffer.file`.
    """
    if nbytes < 1:
        raise CacheStateError(f"a host buffer needs at least one byte, got {nbytes}")
    file = os.memfd_create("kvcache-host") if shared else -1
    try:
        if shared:
            os.truncate(file, nbytes)
        # Otherwise private, because a shared anonymous mapping is a shmem file, which huge pages usually skip.
        memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if shared:
            os.close(file)
        raise MemoryError(f"the system refused {nbytes} bytes of host memory: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages answers EINVAL; small pages work as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return HostBuffer(memory, file if shared else None)
