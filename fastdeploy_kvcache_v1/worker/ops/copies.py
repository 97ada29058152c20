"""Copies: the contract of copies between two tiers, and those of a CPU."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ...contract.messages import CopyPath
from ...errors import CacheStateError, ConfigError
from .rows import BlockRows, CopySpans, LayerRows

CHOICE = "FASTDEPLOY_KVCACHE_OPS"
"""Environment variable: `numpy` instead of C on a CPU, `paddle` for Paddle's operators."""
LIBRARY = Path(__file__).with_name("_copy_rows.so")
ROW = np.dtype([("target", "u8"), ("source", "u8"), ("target_pitch", "i8"), ("source_pitch", "i8"), ("bytes", "i8")])
"""As in `custom_ops/copy_rows.c`."""


class Copies(ABC):
    """Copies between a device tier and a host tier at fixed addresses.

    `spans` come from `plan_spans` for these tiers. A call is work of `stream`: it is submitted there and enqueues (on a
    GPU) or copies. All copies of one direction go to one stream. An enqueued copy needs only the memory itself.
    """

    def __init__(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> None:
        """Raises `CacheStateError` unless both tiers have the same layers, roles and row sizes."""
        sizes = [[layer.row_bytes for layer in side] for side in (device, host)]
        if sizes[0] != sizes[1] or not device or not device[0]:
            raise CacheStateError("copies need the same roles of the same size in every layer of both tiers")
        self._num_roles, into = len(device[0]), [*zip(chain(*device), chain(*host), strict=True)]
        self._pairs = {True: into, False: [(of, to) for to, of in into]}
        """By `to_device`: target and source of each role of each layer."""
        self._rows = {into: np.array([_row(*pair) for pair in pairs], ROW) for into, pairs in self._pairs.items()}
        """`_pairs` as tables."""

    def layer(self, stream: Any, layer: int, spans: CopySpans, to_device: bool) -> None:
        """Copy the blocks of `spans` of one layer, all roles."""
        first = layer * self._num_roles
        self._copy(stream, first, first + self._num_roles, spans, to_device)

    def all_layers(self, stream: Any, spans: CopySpans, to_device: bool) -> None:
        """Copy the blocks of `spans` of all layers."""
        self._copy(stream, 0, len(self._pairs[True]), spans, to_device)

    @abstractmethod
    def _copy(self, stream: Any, first: int, end: int, spans: CopySpans, to_device: bool) -> None:
        """Copy the rows `[first, end)` of `_pairs`."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Release memory. Every copy has ended."""


def _row(target: BlockRows, source: BlockRows) -> tuple[int, ...]:
    return target.address, source.address, target.pitch, source.pitch, target.row_bytes


def chosen() -> str:
    """Read `CHOICE`: `numpy`, `paddle`, or empty. Raises `ConfigError`."""
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", "numpy", "paddle"):
        raise ConfigError(f"unknown {CHOICE}={choice}: choose numpy or paddle, or unset it")
    return choice


class CpuCopies(Copies):
    """Copies on the calling thread, done on return, without the interpreter lock: by C if built, else by NumPy."""

    def _copy(self, stream: Any, first: int, end: int, spans: CopySpans, to_device: bool) -> None:
        if (by_c := library()) is not None:
            rows = self._rows[to_device].ctypes.data + first * ROW.itemsize
            by_c.copy_rows(rows, end - first, spans.table.ctypes.data, len(spans))
            return
        for target, source in self._pairs[to_device][first:end]:
            for of, to, blocks in spans:
                np.copyto(target.array[to : to + blocks], source.array[of : of + blocks])


@cache
def library() -> Any:
    """Load the C copies; None if they were not built or not chosen."""
    if chosen() == "numpy" or not LIBRARY.exists():
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError:  # built for another machine
        return None
    found.copy_rows.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    found.copy_rows.restype = None
    return found


def cpu_paths() -> tuple[CopyPath, ...]:
    return both_ways(chosen() or ("numpy" if library() is None else "c"))


def both_ways(name: str) -> tuple[CopyPath, ...]:
    return CopyPath("in", name), CopyPath("out", name)
