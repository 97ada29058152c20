"""Host slots of all ranks in the store process, which maps their memory: as places of values, and page by page."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import xxhash

from ..contract.messages import BlockHash
from .base import SlotMemory, StoreKey
from .messages import MappedSlots, Start, StoreBlocks
from .namespace import block_key
from .parts import Parts
from .seal import TRAILER_BYTES

__all__ = ["HostSlots", "Value", "address_of", "map_pages"]

COMPARED_BLOCKS = 8
"""The first that are stored: ranks that share a part must hold the same bytes."""

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; `mmap` does not name it."""

STRETCH = 16 << 20
"""Bytes whose pages are mapped in one call. Meanwhile no other thread can get memory from the kernel."""

LEAST_PRIORITY = 19
"""Of the thread that maps pages."""


class Value(NamedTuple):
    """One part of one block, and where it is in the memory of each rank that holds it."""

    key: StoreKey
    places: Sequence[memoryview]


class HostSlots:
    """Host slots of all ranks, as values of blocks."""

    def __init__(self, start: Start) -> None:
        self.parts = Parts(len(start.memories), start.num_parts)
        self.memories = [
            SlotMemory(memoryview(_mapped(each)), each.slot_bytes, each.file, start.life) for each in start.memories
        ]
        self._num_compared = 0 if self.parts.are_shared else COMPARED_BLOCKS

    def values(self, hashes: Iterable[BlockHash], slots: Iterable[int], parts: Iterable[int]) -> list[Value]:
        """All `parts` of a block, then those of the next."""
        parts = list(parts)
        return [
            Value(block_key(block, part), [self.place(rank, slot) for rank in self.parts.holders(part)])
            for block, slot in zip(hashes, slots, strict=True)
            for part in parts
        ]

    def place(self, rank: int, slot: int) -> memoryview:
        memory = self.memories[rank]
        return memory.view[slot * memory.slot_bytes : (slot + 1) * memory.slot_bytes]

    def ranks_differ(self, command: StoreBlocks) -> bool:
        """Compares the ranks' bytes of the first blocks that are stored."""
        num_left = COMPARED_BLOCKS - self._num_compared
        blocks, slots = command.hashes[:num_left], command.slots[:num_left]
        self._num_compared += len(blocks)
        return any(
            len({xxhash.xxh3_128_digest(place[:-TRAILER_BYTES]) for place in value.places}) > 1
            for value in self.values(blocks, slots, range(self.parts.num_parts))
        )


def map_pages(memories: Iterable[SlotMemory]) -> None:
    """Map every page, on a thread of its own. The ranks have touched all of them, but a process still waits for the
    kernel at its first use of each: a load takes twice as long then. Does nothing where the kernel cannot.

    The page tables take 1/512 of the memory, and 25 to 60 ms per GiB when the process is killed, as they would once all
    slots were used. Huge pages of shared memory (`shmem_enabled`) avoid both.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)  # on Linux, of a thread
    madvise = ctypes.CDLL(None).madvise  # other threads run meanwhile
    for memory in memories:
        begin = address_of(memory.view)
        for at in range(0, len(memory.view), STRETCH):
            num_bytes = min(STRETCH, len(memory.view) - at)
            if madvise(ctypes.c_void_p(begin + at), ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE):
                return


def address_of(place: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(place))


def _mapped(slots: MappedSlots) -> mmap.mmap:
    memory = mmap.mmap(slots.file, slots.num_slots * slots.slot_bytes)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
