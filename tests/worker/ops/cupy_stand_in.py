"""A stand-in for CuPy over host memory, for the GPU suite, the benchmark and the trial of copy paths.

Copies happen at once, so nothing can be said about order, and times mean nothing. Tests install it as `cupy`.
"""

from __future__ import annotations

import ctypes
import sys
import types

import numpy as np

uint8, float16, float32 = np.uint8, np.float16, np.float32


class Array:
    def __init__(self, array):
        self.array, self.shape, self.size = array, array.shape, array.size
        self.data = types.SimpleNamespace(ptr=array.ctypes.data)

    def reshape(self, *shape):
        return Array(self.array.reshape(*shape))

    def __getitem__(self, index):
        return Array(self.array[index])


def zeros(shape, dtype):
    return Array(np.zeros(shape, dtype))


def empty(shape, dtype):
    return Array(np.empty(shape, dtype))


def zeros_like(array):
    return Array(np.zeros_like(array.array))


def asarray(array):
    return Array(array.copy())


def asnumpy(array):
    return array.array.copy()


def matmul(a, b, out):
    assert a.shape[1] == b.shape[0]
    assert out.shape == (a.shape[0], b.shape[1])


class Event:
    done = True
    made = 0

    def __init__(self, block=False, disable_timing=False):
        Event.made += 1
        self.ptr, self.timed = Event.made, not disable_timing

    def synchronize(self):
        pass

    def record(self, stream):
        self.stream = stream.ptr


class Stream:
    def __init__(self, non_blocking):
        assert non_blocking
        self.ptr = 0x7700

    def synchronize(self):
        pass

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        assert isinstance(event, Event)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class RawKernel:
    def __init__(self, code, name):
        assert f"void {name}(" in code

    def __call__(self, grid, block, arguments):
        assert len(grid) == len(block) == 1

    def compile(self):
        pass


class Device:
    def __init__(self, device=0):
        self.id = device

    def synchronize(self):
        pass

    def use(self):
        pass


def _copy_2d(to, to_pitch, of, of_pitch, width, height, kind, stream):
    for row in range(height):
        ctypes.memmove(to + row * to_pitch, of + row * of_pitch, width)


def _elapsed(start, end):
    assert start.timed, "CUDA refuses events without timing"
    assert end.timed
    return 2.0


_memory = {}


def _malloc(nbytes):
    memory = np.zeros(nbytes + 256, np.uint8)
    address = (memory.ctypes.data + 255) // 256 * 256
    _memory[address] = memory
    return address


class CUDARuntimeError(RuntimeError):
    pass


cuda = types.ModuleType("cupy.cuda")
cuda.Event, cuda.Stream, cuda.Device = Event, Stream, Device
cuda.get_elapsed_time = _elapsed
cuda.runtime = types.SimpleNamespace(
    getDeviceProperties=lambda device: {"name": b"none"},
    getDeviceCount=lambda: 1,
    deviceGetPCIBusId=lambda device: "0000:00:00.0",
    driverGetVersion=lambda: 0,
    memGetInfo=lambda: (1 << 40, 1 << 40),
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    hostRegister=lambda *_: None,
    hostUnregister=lambda *_: None,
    malloc=_malloc,
    free=lambda address: _memory.pop(address) is None,
    eventQuery=lambda event: 0,
    streamWaitEvent=lambda stream, event: None,
    streamSynchronize=lambda stream: None,
    memcpyAsync=lambda to, of, nbytes, kind, stream: ctypes.memmove(to, of, nbytes),
    memcpy2DAsync=_copy_2d,
    CUDARuntimeError=CUDARuntimeError,
)
sys.modules["cupy.cuda"] = cuda
