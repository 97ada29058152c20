"""Strided rows of raw bytes, and plans that turn slot lists into few large copies. No dtypes, no paddle import."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract.swap_message import SlotArray
from ...errors import CacheStateError, ConfigError
from ..slot_set import SlotSet, slot_set

ByteRows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class BlockRows:
    """`num_rows` rows of `row_bytes` bytes each, `pitch` bytes apart, starting at `address`.

    A row is one block's part of a tensor. Page-locked host memory is not `on_gpu`. `owner` keeps the memory alive.
    """

    address: int
    num_rows: int
    row_bytes: int
    pitch: int
    on_gpu: bool = False
    owner: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.row_bytes < 1 or self.pitch < self.row_bytes or self.address == 0:
            raise CacheStateError(f"block rows need memory and a pitch of at least one row, got {self}")

    @property
    def is_dense(self) -> bool:
        """True: neighbouring rows are one contiguous range."""
        return self.pitch == self.row_bytes

    @cached_property
    def array(self) -> ByteRows:
        """Zero-copy uint8 view `[num_rows, row_bytes]`; CPU memory only."""
        assert not self.on_gpu, "GPU memory has no NumPy view"
        span = (self.num_rows - 1) * self.pitch + self.row_bytes
        flat = np.frombuffer(memoryview((ctypes.c_uint8 * span).from_address(self.address)), dtype=np.uint8)
        return np.lib.stride_tricks.as_strided(flat, (self.num_rows, self.row_bytes), (self.pitch, 1))


class LayerRows(tuple[BlockRows, ...]):
    """The rows of one layer, in role order."""

    @property
    def row_bytes(self) -> tuple[int, ...]:
        return tuple(row.row_bytes for row in self)


def tensor_rows(tensor: Any, *, num_rows: int, row_bytes: int) -> BlockRows:
    """Make the rows of a paddle tensor or NumPy array `[num_rows, ...]` of any dtype, whose first axis is the block.

    Raises `ConfigError` for a tensor that is not contiguous, has another size, or is neither in CPU nor GPU memory.
    """
    if isinstance(tensor, np.ndarray):
        address, contiguous, nbytes, on_gpu = tensor.ctypes.data, tensor.flags.c_contiguous, tensor.nbytes, False
    else:
        address, contiguous = tensor.data_ptr(), tensor.is_contiguous()
        nbytes = int(np.prod(tensor.shape)) * tensor.element_size()
        on_gpu = bool(tensor.place.is_gpu_place())
        if not on_gpu and not tensor.place.is_cpu_place():
            raise ConfigError(f"a cache tensor must be in CPU or GPU memory, got {tensor.place}")
    if not contiguous:
        raise ConfigError(f"a cache tensor must be contiguous, got shape {list(tensor.shape)}")
    if nbytes != num_rows * row_bytes:
        raise ConfigError(f"got a cache tensor of {nbytes} bytes, expected {num_rows} blocks of {row_bytes}")
    return BlockRows(address, num_rows, row_bytes, row_bytes, on_gpu=on_gpu, owner=tensor)


@dataclass(eq=False)
class CopySpans:
    """Immutable spans of neighbouring slots."""

    table: npt.NDArray[np.int64]
    """`[spans, 3]`, C-contiguous: first source, first target, number of blocks."""
    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """Every row that is read and written, `[blocks]` each."""
    reads: SlotSet
    writes: SlotSet
    """`sources` and `targets` as sets."""

    def __post_init__(self) -> None:
        assert self.table.dtype == np.int64
        assert self.table.flags.c_contiguous

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.table.tolist())


def plan_spans(sources: Sequence[int], targets: Sequence[int], *, num_sources: int, num_targets: int) -> CopySpans:
    """Validate slot lists and make the fewest spans that copy `sources[i]` to `targets[i]`, ordered by source.

    Raises `CacheStateError` for unequal lengths, slots out of range, or a target that is written twice. O(n log n),
    independent of the tiers' sizes.
    """
    if len(sources) != len(targets):
        raise CacheStateError(f"a copy needs one target per source, got {len(targets)} for {len(sources)}")
    source, target = _slot_array("source", sources, num_sources), _slot_array("target", targets, num_targets)
    reads, writes = slot_set(source), slot_set(target)
    if len(writes) < len(target):
        raise CacheStateError(f"a copy writes a target slot twice: {sorted(targets)}")
    pairs = np.sort(source * num_targets + target)  # one key sorts several times as fast as two
    source, target = np.divmod(pairs, num_targets)
    is_first = np.ones(len(source) + 1, np.bool_)
    is_first[1:-1] = (source[1:] != source[:-1] + 1) | (target[1:] != target[:-1] + 1)
    edges = np.flatnonzero(is_first)
    starts = edges[:-1]
    table = np.empty((len(starts), 3), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = source[starts], target[starts], edges[1:] - starts
    return CopySpans(table, source, target, reads, writes)


def _slot_array(what: str, slots: Sequence[int], num_slots: int) -> npt.NDArray[np.int64]:
    if isinstance(slots, SlotArray):
        numbers = np.frombuffer(slots.packed, np.int32).astype(np.int64)
    else:
        try:  # faster than NumPy's own conversion, and it accepts integers only
            numbers = np.frombuffer(array("q", slots), np.int64)
        except (TypeError, OverflowError):
            raise CacheStateError(f"{what} slots must be integers, got {slots!r}") from None
    if len(numbers) and numbers.view(np.uint64).max() >= num_slots:  # a negative number becomes a huge one
        raise CacheStateError(f"{what} slots must be in [0, {num_slots}), got {min(slots)}..{max(slots)}")
    return numbers
