"""Tries one way to copy on a GPU, over memory of its own: a process that `ops/trial.py` starts.

Every byte of rows of many widths is compared, in both directions at once, beside a busy stream; then the way is timed.
Lines on stdout say what is being tried; the last one is an `Answer`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import TransferError
from ..ops.cuda_copies import CudaCopies
from ..ops.rates import JOINED, Rates, Timing
from ..ops.rows import BlockRows, ByteRows, CopyRuns, LayerRows, plan_runs
from ..ops.trial import LIMIT_S, Answer
from .cuda import CudaStream, stream_on

WINDOW = 72 << 20
"""Bytes at the start of each tier that copies use; at its end `FAR_ROWS` rows are used as well."""

FAR_ROWS, FAR_ROW, FAR_BLOCK = 16, 64 << 10, 1 << 20
"""Rows that lie as far from the first ones as the tiers are large, and the bytes from one host block to the next."""

DEVICE_BYTES, HOST_BYTES = 5 << 30, 1 << 40
"""Of the tiers, where there is so much: past what 32 bits count. The host's are addresses, few of them with memory."""

SLACK = 64 << 20
"""Bytes of the GPU that are left free."""

WIDTHS = ((512,), (4096, 2048), (7, 100), (4112,), (64 << 10,), (256 << 10,))
"""Bytes of a row, of each layer."""

MOST_BLOCKS, MOST_BYTES = 8192, 16 << 20
"""Of a tier whose every byte is compared."""

TIMED_BLOCKS, TIMED_BYTES = 512, WINDOW // 2
"""Of a copy that is timed; they take twice as much of both tiers."""

REPEATS = 3

_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""

_PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister, as the pool has them."""

_NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python names from 3.11 on."""


Places = npt.NDArray[np.int64]
Images = list[ByteRows]
"""What the used slots of a tier hold, or have to hold: uint8 `[slots, bytes of a row]` for each layer."""


@dataclass(frozen=True)
class _Case:
    """Two tiers, dense on the device, by blocks on the host, of layers with one role; and the slots that are used."""

    widths: tuple[int, ...]
    device: list[LayerRows]
    host: list[LayerRows]
    device_slots: Places
    host_slots: Places

    def plan(self, device: Places, host: Places, *, to_device: bool) -> CopyRuns:
        """From places among the slots of one tier to as many of the other's."""
        sides = [(self.host_slots[host], self.host), (self.device_slots[device], self.device)]
        (of, sources), (to, targets) = sides if to_device else sides[::-1]
        num_sources, num_targets = sources[0][0].num_rows, targets[0][0].num_rows
        return plan_runs(of.tolist(), to.tolist(), num_sources=num_sources, num_targets=num_targets)

    def ranges(self, images: Images) -> Iterator[tuple[int, ByteRows]]:
        """Where neighbouring slots lie on the device, and the rows of an image that are theirs."""
        edges = [0, *(np.flatnonzero(np.diff(self.device_slots) != 1) + 1).tolist(), len(self.device_slots)]
        for (rows,), image in zip(self.device, images, strict=True):
            for first, end in pairwise(edges):
                yield rows.address + int(self.device_slots[first]) * rows.pitch, image[first:end]


class _Memory:
    """Both tiers, as large as the machine allows, for cases of every width. Goes with the process."""

    def __init__(self, cupy: Any) -> None:
        self._runtime = cupy.cuda.runtime
        free, _total = self._runtime.memGetInfo()
        self.device_bytes = min(DEVICE_BYTES, (free - SLACK) // FAR_BLOCK * FAR_BLOCK)
        if self.device_bytes < WINDOW:
            raise MemoryError(f"the GPU has {free} bytes free, a trial takes {WINDOW + SLACK}")
        self.device = int(self._runtime.malloc(self.device_bytes))
        self._map = _far_mapping(HOST_BYTES, self.device_bytes)
        self.host_bytes = len(self._map)
        self.host = np.frombuffer(self._map, np.uint8).ctypes.data
        far = FAR_ROWS * FAR_BLOCK
        for start, nbytes in ((0, WINDOW), (self.host_bytes - far, far)):
            self._runtime.hostRegister(self.host + start, nbytes, _PORTABLE_AND_MAPPED)

    @property
    def reach(self) -> int:
        """Past the border of 32 bits a tier of the device is like one of the host, which is larger."""
        return self.host_bytes if self.device_bytes >= DEVICE_BYTES else self.device_bytes

    def case(self, widths: tuple[int, ...], slots: int) -> _Case:
        """Tiers of so many slots, all of them used."""
        every = np.arange(slots)
        return self._case(widths, slots, slots, sum(widths), every, every)

    def far_case(self) -> _Case:
        """The first rows and the last ones."""
        device, host = self.device_bytes // FAR_ROW, self.host_bytes // FAR_BLOCK
        ends = [np.r_[0:FAR_ROWS, slots - FAR_ROWS : slots] for slots in (device, host)]
        return self._case((FAR_ROW,), device, host, FAR_BLOCK, *ends)

    def _case(self, widths: tuple[int, ...], device: int, host: int, pitch: int, *used: Places) -> _Case:
        of_device, of_host = [], []
        for start, width in zip([0, *accumulate(widths[:-1])], widths, strict=True):
            place = self.device + start * device
            of_device.append(LayerRows([BlockRows(place, device, width, width, on_gpu=True)]))
            of_host.append(LayerRows([BlockRows(self.host + start, host, width, pitch)]))
        return _Case(widths, of_device, of_host, *used)

    def write(self, case: _Case, device: Images, host: Images) -> None:
        for (rows,), image in zip(case.host, host, strict=True):
            rows.array[case.host_slots] = image
        for place, part in case.ranges(device):
            self._runtime.memcpy(place, part.ctypes.data, part.nbytes, self._runtime.memcpyHostToDevice)
        self._runtime.streamSynchronize(0)  # a call may return while the last bytes are on their way

    def differing(self, case: _Case, device: Images, host: Images) -> int:
        """How many bytes are others."""
        pairs = [(rows.array[case.host_slots], image) for (rows,), image in zip(case.host, host, strict=True)]
        for place, part in case.ranges(device):
            pairs.append((np.empty_like(part), part))
            self._runtime.memcpy(pairs[-1][0].ctypes.data, place, part.nbytes, self._runtime.memcpyDeviceToHost)
        self._runtime.streamSynchronize(0)
        return sum(int(np.count_nonzero(found != expected)) for found, expected in pairs)


def _far_mapping(nbytes: int, least: int) -> mmap.mmap:
    """Addresses of so many bytes; of fewer, down to `least`, where the system refuses. Raises `MemoryError`."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE  # a process's limit on data counts what is private
    while True:
        try:
            return mmap.mmap(-1, nbytes, flags=flags)
        except OSError as error:
            if nbytes <= least:
                raise MemoryError(f"the system refused {nbytes} bytes of addresses: {error}") from error
            nbytes = max(least, nbytes // 4)


class _Trial:
    def __init__(self, cupy: Any, way: str, device: int) -> None:
        self._cupy, self._way = cupy, way
        self._into, self._out, self._compute = (stream_on(device, name) for name in ("in", "out", "compute"))
        self._memory = _Memory(cupy)
        self._scratch = int(cupy.cuda.runtime.malloc(2 << 20))
        self._random = np.random.default_rng(0)

    def answer(self, row_bytes: Sequence[int]) -> Answer:
        cases = [self._memory.case(widths, _most(widths)) for widths in (*WIDTHS, tuple(row_bytes))]
        for case in (*cases, self._memory.far_case()):
            with self._copies(case) as copies:
                for together in (1, 3, len(case.device_slots) // 2):
                    print(f"rows of {case.widths} bytes, {together} in a run", flush=True)
                    if wrong := self._differing(case, copies, together):
                        left = f"{wrong} bytes were others, rows of {case.widths} bytes, {together} in a run"
                        return Answer(left, is_wrong=True, is_lasting=False)
        timings = [(to, *self._timing(each, to_device=to)) for to in (True, False) for each in row_bytes]
        reach = self._memory.reach
        return Answer(reach=reach, timings=timings, is_lasting=reach > DEVICE_BYTES)

    @contextmanager
    def _copies(self, case: _Case) -> Iterator[CudaCopies]:
        """By the way that is tried, alone. Raises `TransferError` where it is left."""
        timings = dict.fromkeys((True, False), (Timing(1, 1.0, 1.0),))
        copies = CudaCopies(self._cupy, case.device, case.host, Rates({self._way: timings}, reach=1 << 62))
        if self._way in copies.left:
            raise TransferError(copies.left[self._way])
        yield copies
        copies.close()  # not while they run: after a failure it is for the end of the process

    def _differing(self, case: _Case, copies: CudaCopies, together: int) -> int:
        """Half of the blocks go in while the other half goes out, `together` neighbours in a run."""
        half = len(case.device_slots) // 2
        device_order, host_order = (self._order(2 * half, together) for _ in range(2))
        device, host = (
            [self._random.integers(0, 256, (len(slots), width), np.uint8) for width in case.widths]
            for slots in (case.device_slots, case.host_slots)
        )
        self._memory.write(case, device, host)
        into = case.plan(device_order[:half], host_order[:half], to_device=True)
        out = case.plan(device_order[half:], host_order[half:], to_device=False)
        for number in range(64):
            self._copy_scratch(number)
        for layer in range(len(case.widths)):
            copies.layer(self._into, layer, into, to_device=True)
        copies.all_layers(self._out, out, to_device=False)
        for stream in (self._into, self._out, self._compute):
            stream.synchronize()
        for on_device, on_host in zip(device, host, strict=True):
            on_device[device_order[:half]] = on_host[host_order[:half]]
            on_host[host_order[half:]] = on_device[device_order[half:]]
        return self._memory.differing(case, device, host)

    def _order(self, count: int, together: int) -> Places:
        groups = self._random.permutation(math.ceil(count / together))
        order = (groups[:, None] * together + np.arange(together)).ravel()
        return order[order < count]

    def _copy_scratch(self, number: int) -> None:
        half = 1 << 20
        to = self._scratch + half * (number % 2)
        of, runtime = self._scratch + half - half * (number % 2), self._cupy.cuda.runtime
        runtime.memcpyAsync(to, of, half, runtime.memcpyDeviceToDevice, self._compute.handle)

    def _timing(self, width: int, *, to_device: bool) -> Timing:
        print(f"timing rows of {width} bytes, {'to' if to_device else 'from'} the device", flush=True)
        blocks = max(JOINED, min(TIMED_BLOCKS, TIMED_BYTES // width) // JOINED * JOINED)
        case = self._memory.case((width,), 2 * blocks)
        mixed = self._random.permutation(blocks)
        groups = 17 * self._random.permutation(blocks // JOINED)[:, None] + np.arange(JOINED)
        sorted_groups = np.sort(groups, axis=0)
        shapes = [(2 * np.arange(blocks), 2 * mixed), (sorted_groups.ravel(), groups.ravel())]
        stream = self._into if to_device else self._out
        with self._copies(case) as copies:
            apart, joined = (
                _nanoseconds(copies, stream, case.plan(*shape, to_device=to_device), to_device=to_device) / blocks
                for shape in shapes
            )
        return Timing(width, apart, joined)


def _most(widths: tuple[int, ...]) -> int:
    """Slots of a tier whose every byte is compared; 4,000 runs each way of narrow rows."""
    return max(8, min(MOST_BLOCKS if len(widths) == 1 else MOST_BLOCKS // 8, MOST_BYTES // sum(widths)))


def _nanoseconds(copies: CudaCopies, stream: CudaStream, runs: CopyRuns, *, to_device: bool) -> float:
    """Until the bytes are there, and half of this thread's time: the best of a few, the first of which plans."""
    found = []
    for _ in range(1 + REPEATS):
        begin, before = stream.record_event(timed=True), time.perf_counter_ns()
        copies.all_layers(stream, runs, to_device=to_device)
        of_thread = time.perf_counter_ns() - before
        end = stream.record_event(timed=True)
        stream.synchronize()
        end.wait()
        found.append(1e9 * end.seconds_since(begin) + of_thread / 2)
    return min(found)


def try_way(way: str, device: int, row_bytes: Sequence[int]) -> Answer:
    """Whatever goes wrong is the answer."""
    try:
        import cupy

        return _Trial(cupy, way, device).answer(row_bytes)
    except Exception as error:  # the edge of the process
        lacks_memory = isinstance(error, MemoryError) or getattr(error, "status", 0) == _OUT_OF_MEMORY
        return Answer(f"{error}".partition("\n")[0] or type(error).__name__, is_lasting=not lacks_memory)


def main() -> None:
    signal.alarm(2 * int(LIMIT_S))  # where who started it has died
    print(json.dumps(try_way(**json.loads(sys.argv[-1]))._asdict()), flush=True)
    os._exit(0)  # what a broken context does at the end of a process, it does not do here


if __name__ == "__main__":
    main()
