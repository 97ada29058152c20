"""Trial of one copy path on a GPU, over memory of its own, in a process that `trial.py` starts.

It compares every byte of rows of many widths, in both directions at once, beside a busy stream. Then it measures times.
Lines on stdout name the current trial; the last line is an `Answer`.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import TransferError
from ..ops.copies import Copies, CpuCopies
from ..ops.rows import BlockRows, ByteRows, CopySpans, LayerRows, plan_spans
from .copies import CudaCopies
from .rates import JOINED, KERNEL, Rates, Timing
from .runtime import MAPPED, PORTABLE, CudaStream
from .trial import LIMIT_S, Answer

WINDOW = 72 << 20
"""Bytes at the start of each tier that copies use, besides `FAR_SLOTS` at its end."""
FAR_SLOTS, FAR_ROW, FAR_BLOCK = 8, 64 << 10, 1 << 20
"""Rows of which half are at the tiers' ends; bytes of a row, and of its host block."""
DEVICE_BYTES, HOST_BYTES = 5 << 30, 1 << 40
"""Most bytes of the tiers, beyond 32 bits. The host tier is addresses, most of them without memory."""
SLACK = 64 << 20
"""Bytes of the GPU that stay free."""
WIDTHS = ((512,), (4096, 2048), (7, 100), (4112,), (64 << 10,), (256 << 10,))
"""Bytes of a row of each layer."""
MOST_BLOCKS, MOST_BYTES = 8192, 16 << 20
"""Of a tier that is compared: 4,000 spans of narrow rows in each direction."""
TIMED_BLOCKS, TIMED_BYTES = 512, WINDOW // 2
"""Of a timed copy, which takes twice as much of both tiers."""
REPEATS = 3
KERNEL_COST = 1.25
"""A swap-in by the kernel takes multiprocessors from the pass, which copy engines do not: its time counts so much more.
A swap-out's launch is small, and slower for it.
"""
Slots = npt.NDArray[np.int64]


class _Tiers:
    """Tiers of layers with one role: dense on the device, by blocks on the host. Copies use the slots at both ends."""

    def __init__(
        self, places: Sequence[int], slots: Sequence[int], used: int, widths: Sequence[int], block: int, *, on_gpu: bool
    ) -> None:
        """`places`, `slots`: device, host. `used`: slots that copies use. `block`: bytes of a host block."""
        self.widths, self.used = tuple(widths), used
        self._places, self._slots, self._slot_bytes = places, slots, (sum(widths), block)
        self.device, self.host = [], []
        for start, width in zip(accumulate(widths, initial=0), widths, strict=False):
            dense = BlockRows(places[0] + start * slots[0], slots[0], width, width, on_gpu=on_gpu)
            self.device.append(LayerRows([dense]))
            self.host.append(LayerRows([BlockRows(places[1] + start, slots[1], width, block)]))

    def twin(self, random: np.random.Generator) -> tuple[_Tiers, list[ByteRows]]:
        """Make tiers of the used slots in plain memory, and the random bytes of both."""
        contents = [random.integers(0, 256, self.used * nbytes, np.uint8) for nbytes in self._slot_bytes]
        places, slots = [each.ctypes.data for each in contents], (self.used, self.used)
        return _Tiers(places, slots, self.used, self.widths, self._slot_bytes[1], on_gpu=False), contents

    def pieces(self, contents: Sequence[ByteRows]) -> Iterator[tuple[int, ByteRows]]:
        """Yield addresses in these tiers and the twin's bytes for them."""
        for place, slots, nbytes, part in zip(self._places, self._slots, self._slot_bytes, contents, strict=True):
            half = len(part) // 2
            yield place, part[:half]
            yield place + slots * nbytes - len(part[half:]), part[half:]

    def plan(self, device: Slots, host: Slots, *, to_device: bool) -> CopySpans:
        """Plan copies between used slots, given by their numbers."""
        sides = [
            ((numbers + (numbers >= self.used // 2) * (slots - self.used)).tolist(), slots)
            for numbers, slots in zip((device, host), self._slots, strict=True)
        ]
        (to, num_targets), (of, num_sources) = sides if to_device else sides[::-1]
        return plan_spans(of, to, num_sources=num_sources, num_targets=num_targets)


class _Trial:
    """Trial of one path on one GPU. Its memory is freed with the process."""

    def __init__(self, cupy: Any, path: str, device: int) -> None:
        self._cupy, self._runtime, self._path = cupy, cupy.cuda.runtime, path
        self._into, self._out, self._compute = (CudaStream(device, name) for name in ("in", "out", "compute"))
        self._random = np.random.default_rng(0)
        free, _total = self._runtime.memGetInfo()
        device_bytes = min(DEVICE_BYTES, (free - SLACK) // FAR_BLOCK * FAR_BLOCK)
        if device_bytes < WINDOW:
            raise MemoryError(f"the GPU has {free} bytes free, a trial needs {WINDOW + SLACK}")
        self._map = _addresses([*(HOST_BYTES >> shift for shift in range(0, 8, 2)), device_bytes])
        self._nbytes = device_bytes, len(self._map)
        self._places = int(self._runtime.malloc(device_bytes)), np.frombuffer(self._map, np.uint8).ctypes.data
        self._scratch = int(self._runtime.malloc(2 << 20))
        far = FAR_SLOTS // 2 * FAR_BLOCK
        for start, nbytes in ((0, WINDOW), (len(self._map) - far, far)):
            self._runtime.hostRegister(self._places[1] + start, nbytes, PORTABLE | MAPPED)

    def answer(self, row_bytes: Sequence[int]) -> Answer:
        far = self._nbytes[0] // FAR_ROW, self._nbytes[1] // FAR_BLOCK
        cases = [self._tiers(widths, min(MOST_BLOCKS, MOST_BYTES // sum(widths))) for widths in (*WIDTHS, row_bytes)]
        for tiers in (*cases, _Tiers(self._places, far, FAR_SLOTS, (FAR_ROW,), FAR_BLOCK, on_gpu=True)):
            copies = self._copies(tiers)
            for together in (1, 3, tiers.used // 2):
                what = f"rows of {tiers.widths} bytes, {together} in a span"
                print(what, flush=True)
                if wrong := self._wrong_bytes(copies, tiers, together):
                    return Answer(f"{wrong} wrong bytes, {what}", is_wrong=True, is_lasting=False)
            copies.close()
        out, into = (tuple(self._timing(each, to_device=to) for each in row_bytes) for to in (False, True))
        # Beyond 32 bits a device tier behaves like a host tier, which is larger.
        reach = self._nbytes[self._nbytes[0] >= DEVICE_BYTES]
        return Answer(reach=reach, timings=(out, into), is_lasting=reach > DEVICE_BYTES)

    def _tiers(self, widths: Sequence[int], slots: int) -> _Tiers:
        """Make dense tiers of at least 8 slots, all used."""
        slots = max(8, slots)
        return _Tiers(self._places, (slots, slots), slots, widths, sum(widths), on_gpu=True)

    def _copies(self, tiers: _Tiers) -> CudaCopies:
        """Make copies by this path alone. Raises `TransferError` if it cannot be used."""
        timings = (Timing(1, 1.0, 1.0),)
        rates = Rates({self._path: (timings, timings)}, reach=1 << 62)
        copies = CudaCopies(self._cupy, tiers.device, tiers.host, rates)
        if self._path in copies.left:
            raise TransferError(copies.left[self._path])
        return copies

    def _wrong_bytes(self, copies: CudaCopies, tiers: _Tiers, together: int) -> int:
        """Copy half of the blocks in and half out, in spans of `together`; count differences to a CPU's copies in a
        twin.
        """
        (twin, contents), orders = tiers.twin(self._random), [self._order(tiers.used, together) for _ in "io"]
        plans, expected = _plans(tiers, *orders), _plans(twin, *orders)
        for place, part in tiers.pieces(contents):
            self._copy(place, part.ctypes.data, part.nbytes)
        for _ in range(64):
            half, handle = 1 << 20, self._compute.handle
            self._runtime.memcpyAsync(self._scratch + half, self._scratch, half, self._runtime.memcpyDefault, handle)
        for each, (into, out) in ((copies, plans), (CpuCopies(twin.device, twin.host), expected)):
            self._exchange(each, len(tiers.widths), into, out, by_layer=together == 1)
        for stream in (self._into, self._out, self._compute):
            stream.synchronize()
        wrong = 0
        for place, part in tiers.pieces(contents):
            found = np.empty_like(part)
            self._copy(found.ctypes.data, place, part.nbytes)
            wrong += int(np.count_nonzero(found != part))
        return wrong

    def _copy(self, to: int, of: int, nbytes: int) -> None:
        self._runtime.memcpy(to, of, nbytes, self._runtime.memcpyDefault)
        self._runtime.streamSynchronize(0)  # the call may return before the last bytes have arrived

    def _exchange(self, copies: Copies, num_layers: int, into: CopySpans, out: CopySpans, *, by_layer: bool) -> None:
        """`by_layer`: of swap-outs, which have two shapes."""
        for layer in range(num_layers):
            copies.layer(self._into, layer, into, to_device=True)
            if by_layer:
                copies.layer(self._out, layer, out, to_device=False)
        if not by_layer:
            copies.all_layers(self._out, out, to_device=False)

    def _order(self, count: int, together: int) -> Slots:
        groups = self._random.permutation(math.ceil(count / together))
        order = (groups[:, None] * together + np.arange(together)).ravel()
        return order[order < count]

    def _timing(self, width: int, *, to_device: bool) -> Timing:
        print(f"timing rows of {width} bytes, {'to' if to_device else 'from'} the device", flush=True)
        blocks = max(JOINED, min(TIMED_BLOCKS, TIMED_BYTES // width) // JOINED * JOINED)
        tiers = self._tiers((width,), 2 * blocks)
        groups = 17 * self._random.permutation(blocks // JOINED)[:, None] + np.arange(JOINED)
        apart = 2 * np.arange(blocks), 2 * self._random.permutation(blocks)
        joined = np.sort(groups, axis=0).ravel(), groups.ravel()
        copies, stream = self._copies(tiers), self._into if to_device else self._out
        plans = (tiers.plan(*shape, to_device=to_device) for shape in (apart, joined))
        cost = (KERNEL_COST if self._path == KERNEL and to_device else 1.0) / blocks
        timing = Timing(width, *(cost * _nanoseconds(copies, stream, plan, to_device=to_device) for plan in plans))
        copies.close()
        return timing


def _plans(tiers: _Tiers, device: Slots, host: Slots) -> tuple[CopySpans, CopySpans]:
    """Plan swap-ins of the first half of the blocks and swap-outs of the others."""
    half = tiers.used // 2
    into = tiers.plan(device[:half], host[:half], to_device=True)
    return into, tiers.plan(device[half:], host[half:], to_device=False)


def _addresses(sizes: Sequence[int]) -> mmap.mmap:
    """Map the first of these sizes that the system grants. Raises `MemoryError`."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.11 on
    for nbytes in sizes:
        with suppress(OSError):  # shared: a process's limit on data counts private mappings
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | no_reserve)
    raise MemoryError(f"the system refused {nbytes} bytes of addresses")


def _nanoseconds(copies: CudaCopies, stream: CudaStream, spans: CopySpans, *, to_device: bool) -> float:
    """Best time of a few copies: until the bytes have arrived, plus half of this thread's time. The first one plans."""
    found = []
    for _ in range(1 + REPEATS):
        begin, before = stream.record_event(timed=True), time.perf_counter_ns()
        copies.all_layers(stream, spans, to_device=to_device)
        of_thread = time.perf_counter_ns() - before
        end = stream.record_event(timed=True)
        stream.synchronize()
        end.wait()
        found.append(1e9 * end.seconds_since(begin) + of_thread / 2)
    return min(found)


def try_path(path: str, device: int, row_bytes: Sequence[int]) -> Answer:
    """Try `path`; any error becomes the answer."""
    try:
        import cupy

        return _Trial(cupy, path, device).answer(row_bytes)
    except Exception as error:  # the edge of the process
        lacks_memory = isinstance(error, MemoryError) or getattr(error, "status", 0) == 2  # cudaErrorMemoryAllocation
        return Answer(f"{error}".partition("\n")[0] or type(error).__name__, is_lasting=not lacks_memory)


def main(path: str, device: int, row_bytes: Sequence[int]) -> None:
    signal.alarm(2 * int(LIMIT_S))  # if the parent has died
    print(f"\n{msgspec.json.encode(try_path(path, device, row_bytes)).decode()}", flush=True)  # libraries write, too
    os._exit(0)  # skips the exit handlers of a broken context
