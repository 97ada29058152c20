"""A GPU that does nothing, for the costs of the worker's own thread: a stand-in for CuPy whose calls are counted, and
copies that are not made. An event is done `STEPS_IN_FLIGHT` steps after it was recorded."""

from __future__ import annotations

import sys
import types
from collections import Counter
from typing import Any

STEPS_IN_FLIGHT = 3

calls: Counter[str] = Counter()
"""Driver calls so far, by name."""

_SUCCESS, _NOT_READY = 0, 600


class Clock:
    step = 0


class _Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.ptr = self
        self.step = 0

    def record(self, stream: Any) -> None:
        calls["eventRecord"] += 1
        self.step = Clock.step


class _Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)

    def wait_event(self, event: _Event) -> None:
        calls["streamWaitEvent"] += 1

    def synchronize(self) -> None:
        pass


class _Device:
    def __init__(self, device: int) -> None:
        pass

    def use(self) -> None:
        pass


def _query(event: _Event) -> int:
    calls["eventQuery"] += 1
    return _SUCCESS if event.step + STEPS_IN_FLIGHT <= Clock.step else _NOT_READY


def _stream_wait(stream: int, event: _Event) -> None:
    calls["streamWaitEvent"] += 1


def enter() -> None:
    """From now on `cupy` is the stand-in. Before a `CudaRuntime` is made."""
    runtime: Any = types.ModuleType("cupy.cuda.runtime")
    cuda: Any = types.ModuleType("cupy.cuda")
    cupy: Any = types.ModuleType("cupy")
    runtime.eventQuery, runtime.streamWaitEvent = _query, _stream_wait
    cuda.runtime, cuda.Event, cuda.Stream, cuda.Device = runtime, _Event, _Stream, _Device
    cuda.ExternalStream = lambda pointer: _Stream()
    cuda.get_elapsed_time = lambda start, end: 1.0
    cupy.cuda = cuda
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime})


def copy(*_: Any) -> None:
    """Instead of a copy op."""
    calls["copies"] += 1
