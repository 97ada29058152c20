"""Strided rows of raw bytes, and how slot lists become few large copies. Bytes only: no dtype, no paddle import."""

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

    One row is what one layer's tensor of one role keeps of one block. `on_gpu` says which memory `address` means;
    page-locked host memory is not `on_gpu`. Holds `owner`, whose memory this is, alive.
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
        """True when neighbouring rows are one contiguous range."""
        return self.pitch == self.row_bytes

    @cached_property
    def array(self) -> ByteRows:
        """Zero-copy uint8 view `[num_rows, row_bytes]`; CPU memory only."""
        assert not self.on_gpu, "GPU memory has no NumPy view"
        span = (self.num_rows - 1) * self.pitch + self.row_bytes
        flat = np.frombuffer(memoryview((ctypes.c_uint8 * span).from_address(self.address)), dtype=np.uint8)
        return np.lib.stride_tricks.as_strided(flat, (self.num_rows, self.row_bytes), (self.pitch, 1))


class LayerRows(tuple[BlockRows, ...]):
    """The rows of one layer, one entry per role, in role order."""

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """By role."""
        return tuple(row.row_bytes for row in self)


def tensor_rows(tensor: Any, *, num_rows: int, row_bytes: int) -> BlockRows:
    """Rows of a paddle tensor (or NumPy array) `[num_rows, ...]` whose first axis is the block.

    Works for every dtype, bfloat16 included, because only the address is used. Raises `ConfigError` for a tensor that
    is not contiguous, has another size, or lives neither in CPU nor in GPU memory.
    """
    if isinstance(tensor, np.ndarray):
        address, contiguous, nbytes, on_gpu = tensor.ctypes.data, tensor.flags.c_contiguous, tensor.nbytes, False
    else:
        address, contiguous = tensor.data_ptr(), tensor.is_contiguous()
        nbytes = int(np.prod(tensor.shape)) * tensor.element_size()
        on_gpu = bool(tensor.place.is_gpu_place())
        if not on_gpu and not tensor.place.is_cpu_place():
            raise ConfigError(f"a cache tensor must be in CPU or GPU memory, not {tensor.place}")
    if not contiguous:
        raise ConfigError(f"a cache tensor must be contiguous, got shape {list(tensor.shape)}")
    if nbytes != num_rows * row_bytes:
        raise ConfigError(f"a cache tensor has {nbytes} bytes, its layout needs {num_rows} blocks of {row_bytes}")
    return BlockRows(address, num_rows, row_bytes, row_bytes, on_gpu=on_gpu, owner=tensor)


@dataclass(eq=False)
class CopySpans:
    """Runs as a table, so that nobody looks at them one by one. Nothing of it changes any more."""

    table: npt.NDArray[np.int64]
    """`[spans, 3]`, C-contiguous: first source, first target, and how many neighbours go there."""
    sources: npt.NDArray[np.int64]
    """Every row that is read, `[blocks]`."""
    targets: npt.NDArray[np.int64]
    """Every row that is written, `[blocks]`."""
    reads: SlotSet
    writes: SlotSet
    """The same rows as sets."""

    def __post_init__(self) -> None:
        assert self.table.dtype == np.int64
        assert self.table.flags.c_contiguous

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.table.tolist())


def plan_spans(sources: Sequence[int], targets: Sequence[int], *, num_sources: int, num_targets: int) -> CopySpans:
    """Validate a slot list and coalesce it: the fewest spans that copy `sources[i]` to `targets[i]`.

    Raises `CacheStateError`, before anything was touched, for unequal lengths, ids out of range, or a target that
    is written twice. O(n log n), whatever the size of the tiers; the spans come in the order of their sources.
    """
    if len(sources) != len(targets):
        raise CacheStateError(f"a copy needs one target per source, got {len(sources)} and {len(targets)}")
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
        try:  # as NumPy's own conversion, but faster, and it refuses what is no integer
            numbers = np.frombuffer(array("q", slots), np.int64)
        except (TypeError, OverflowError):
            raise CacheStateError(f"{what} slots must be integers, got {slots!r}") from None
    if len(numbers) and numbers.view(np.uint64).max() >= num_slots:  # a negative number is a huge one then
        raise CacheStateError(f"{what} slots must be in [0, {num_slots}), got {min(slots)}..{max(slots)}")
    return numbers
