"""Streams, events and graphs of the fake driver under CuPy's names."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from .. import driver
from . import runtime

__all__ = ["Device", "Event", "ExternalStream", "Stream", "get_current_stream", "get_elapsed_time", "runtime"]

_current: list[Any] = []


class _AnyStream:
    ptr: int

    def __enter__(self) -> Any:
        _current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.pop()

    @property
    def done(self) -> bool:
        return driver.status_of("cuStreamQuery", self.ptr) == 0

    def synchronize(self) -> None:
        driver.call("cuStreamSynchronize", self.ptr)

    def record(self, event: Event | None = None) -> Event:
        made = Event() if event is None else event
        made.record(self)
        return made

    def wait_event(self, event: Event) -> None:
        driver.call("cuStreamWaitEvent", self.ptr, event.ptr, ctypes.c_uint(0))


class Stream(_AnyStream):
    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0 if null else driver.new_handle("cuStreamCreate", ctypes.c_uint(int(non_blocking)))
        if not null:
            weakref.finalize(self, driver.release, "cuStreamDestroy", self.ptr).atexit = False

    @staticmethod
    def from_external(stream: Any) -> ExternalStream:
        return ExternalStream(stream.__cuda_stream__()[1])

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)


class ExternalStream(_AnyStream):
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr = ptr


_null = Stream(null=True)


def get_current_stream() -> Any:
    return _current[-1] if _current else _null


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = driver.new_handle("cuEventCreate", ctypes.c_uint(2 if disable_timing else 0))
        weakref.finalize(self, driver.release, "cuEventDestroy", self.ptr).atexit = False

    def record(self, stream: Any = None) -> None:
        driver.call("cuEventRecord", self.ptr, (get_current_stream() if stream is None else stream).ptr)

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0

    def synchronize(self) -> None:
        driver.call("cuEventSynchronize", self.ptr)


def get_elapsed_time(start: Event, end: Event) -> float:
    found = ctypes.c_float()
    driver.call("cuEventElapsedTime", ctypes.byref(found), start.ptr, end.ptr)
    return found.value


class Device:
    def __init__(self, device: int = 0) -> None:
        self.id = device

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        runtime.deviceSynchronize()
