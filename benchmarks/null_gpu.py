"""A GPU that does nothing: a driver whose functions return at once, and a stand-in for CuPy that counts event queries.
An event is done `STEPS_IN_FLIGHT` steps after it was made.
"""

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

SOURCE = b"""
int nothing(void) { return 0; }
int same_address(void **seen, void *host, unsigned flags) { *seen = host; return 0; }
"""

calls: Counter[str] = Counter()
"""Event queries so far."""

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
    id = 0

    def __init__(self, device: int = 0) -> None:
        pass

    def use(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _Pinned:
    def __init__(self, nbytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(nbytes)
        self.ptr = ctypes.addressof(self._bytes)


def _query(event: int) -> int:
    calls["eventQuery"] += 1
    return _SUCCESS if _made_in[event] + STEPS_IN_FLIGHT <= Clock.step else _NOT_READY


def enter(directory: Path) -> None:
    """Replace `cupy` and the driver. Call it before a `CudaRuntime` is made. Needs a C compiler."""
    library = directory / "nothing.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-xc", "-", "-o", str(library)], input=SOURCE, check=True)
    functions = ctypes.CDLL(str(library))

    def address_of(name: str) -> int:
        function = functions.same_address if name == "cuMemHostGetDevicePointer" else functions.nothing
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    driver.address_of = address_of
    runtime: Any = types.ModuleType("cupy.cuda.runtime")
    cuda: Any = types.ModuleType("cupy.cuda")
    cupy: Any = types.ModuleType("cupy")
    runtime.eventQuery, runtime.CUDARuntimeError, runtime.memcpyHostToDevice = _query, OSError, 1
    runtime.cudaDevAttrMultiProcessorCount, runtime.deviceGetAttribute = 16, lambda *_: 132
    runtime.malloc = runtime.free = runtime.memcpy = runtime.streamSynchronize = lambda *_: 0
    cuda.runtime, cuda.Event, cuda.Stream, cuda.Device = runtime, _Event, _Stream, _Device
    cuda.alloc_pinned_memory, cuda.get_elapsed_time = _Pinned, lambda start, end: 1.0
    cupy.cuda = cuda
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime})
