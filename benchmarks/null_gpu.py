"""A GPU that does nothing, for the costs of the worker's own thread: a driver whose functions return at once, and a
stand-in for CuPy whose questions are counted. An event is done `STEPS_IN_FLIGHT` steps after it was made."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

from fastdeploy_kvcache_v1.worker.cuda import driver

STEPS_IN_FLIGHT = 3

calls: Counter[str] = Counter()
"""Questions so far, by name."""

_SUCCESS, _NOT_READY = 0, 600
_handles = itertools.count(1)
_made_in: dict[int, int] = {}


class Clock:
    step = 0


class _Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.ptr = next(_handles)
        _made_in[self.ptr] = Clock.step

    def __del__(self) -> None:
        del _made_in[self.ptr]


class _Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(_handles)

    def synchronize(self) -> None:
        pass


class _Device:
    def __init__(self, device: int) -> None:
        pass

    def use(self) -> None:
        pass


class _Pinned:
    def __init__(self, nbytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(nbytes)
        self.ptr = ctypes.addressof(self._bytes)


def _query(event: int) -> int:
    calls["eventQuery"] += 1
    return _SUCCESS if _made_in[event] + STEPS_IN_FLIGHT <= Clock.step else _NOT_READY


def enter(directory: Path) -> None:
    """From now on `cupy` and the driver are these. Before a `CudaRuntime` is made."""
    library = directory / "nothing.so"
    source = b"int nothing(void) { return 0; }"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-xc", "-", "-o", str(library)], input=source, check=True)
    address = ctypes.cast(ctypes.CDLL(str(library)).nothing, ctypes.c_void_p).value or 0
    driver.address_of = lambda name: address
    runtime: Any = types.ModuleType("cupy.cuda.runtime")
    cuda: Any = types.ModuleType("cupy.cuda")
    cupy: Any = types.ModuleType("cupy")
    runtime.eventQuery, runtime.CUDARuntimeError, runtime.memcpyHostToDevice = _query, OSError, 1
    runtime.malloc = runtime.free = runtime.memcpy = runtime.streamSynchronize = lambda *_: 0
    cuda.runtime, cuda.Event, cuda.Stream, cuda.Device = runtime, _Event, _Stream, _Device
    cuda.alloc_pinned_memory, cuda.get_elapsed_time = _Pinned, lambda start, end: 1.0
    cupy.cuda = cuda
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime})
