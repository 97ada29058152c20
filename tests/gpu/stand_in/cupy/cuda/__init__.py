"""Streams and events of the fake driver under CuPy's names."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from fake_driver import current as gpu

from . import runtime

__all__ = ["Device", "Event", "ExternalStream", "Stream", "alloc_pinned_memory", "get_current_stream", "runtime"]

_current: list[Any] = []


class _AnyStream:
    ptr: int

    def __enter__(self) -> Any:
        _current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.pop()

    def synchronize(self) -> None:
        gpu.call("cuStreamSynchronize", self.ptr)

    def record(self, event: Event | None = None) -> Event:
        made = Event() if event is None else event
        made.record(self)
        return made

    def wait_event(self, event: Event) -> None:
        gpu.call("cuStreamWaitEvent", self.ptr, event.ptr, 0)


class Stream(_AnyStream):
    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0 if null else gpu.call("cuStreamCreate", int(non_blocking))


class ExternalStream(_AnyStream):
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr = ptr


_null = Stream(null=True)


def get_current_stream() -> Any:
    return _current[-1] if _current else _null


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = gpu.call("cuEventCreate", 2 if disable_timing else 0)

    def record(self, stream: Any = None) -> None:
        gpu.call("cuEventRecord", self.ptr, (get_current_stream() if stream is None else stream).ptr)

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0

    def synchronize(self) -> None:
        gpu.call("cuEventSynchronize", self.ptr)


def get_elapsed_time(start: Event, end: Event) -> float:
    return gpu.call("cuEventElapsedTime", start.ptr, end.ptr)


class _Pinned:
    """Page-locked memory, given back with the last reference to it."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = (ctypes.c_uint8 * nbytes)()
        self.ptr = ctypes.addressof(self._bytes)
        runtime.hostRegister(self.ptr, nbytes, 0)
        weakref.finalize(self, gpu.answer, "cuMemHostUnregister", self.ptr).atexit = False


def alloc_pinned_memory(size: int) -> _Pinned:
    return _Pinned(size)


class Device:
    def __init__(self, device: int = 0) -> None:
        self.id = device

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        runtime.deviceSynchronize()
