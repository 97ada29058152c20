"""A stand-in for the part of CuPy that this package and its GPU suite use, over the fake driver.

Who imports it has the fake driver in place of libcuda, too. A kernel is its NumPy twin.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_driver import current as gpu

from fastdeploy_kvcache_v1.worker.ops import driver

from . import cuda

driver.address_of = gpu.address_of
driver.driver.cache_clear()

__version__ = "14.0.0"

uint8, int32, int64, float16, float32, float64 = np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64


class Memory:
    """One allocation, given back with the last array in it, without waiting for the device."""

    def __init__(self, nbytes: int) -> None:
        self.ptr = gpu.call("cuMemAlloc", max(1, nbytes))
        weakref.finalize(self, gpu.answer, "cuMemFree", self.ptr).atexit = False


class Pointer:
    def __init__(self, memory: Memory, offset: int) -> None:
        self.memory = memory
        self.ptr = memory.ptr + offset


class ndarray:
    """C-contiguous."""

    def __init__(self, shape: Any, dtype: Any = np.float32, data: Pointer | None = None) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(int(each) for each in shape)
        self.dtype = np.dtype(dtype)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.data = Pointer(Memory(self.nbytes), 0) if data is None else data

    def _at(self, offset: int) -> Pointer:
        return Pointer(self.data.memory, self.data.ptr - self.data.memory.ptr + offset)

    def reshape(self, *shape: Any) -> ndarray:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = math.prod(each for each in wanted if each != -1)
        return ndarray([self.size // known if each == -1 else each for each in wanted], self.dtype, self._at(0))

    def __getitem__(self, index: int | slice) -> ndarray:
        row = self.nbytes // self.shape[0]
        if isinstance(index, slice):
            first, end, step = index.indices(self.shape[0])
            assert step == 1
            return ndarray((max(0, end - first), *self.shape[1:]), self.dtype, self._at(first * row))
        return ndarray(self.shape[1:], self.dtype, self._at(index * row))

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, dtype: Any) -> ndarray:
        ratio = self.dtype.itemsize / np.dtype(dtype).itemsize
        return ndarray((*self.shape[:-1], int(self.shape[-1] * ratio)), dtype, self._at(0))

    def fill(self, value: Any) -> None:
        gpu.launch(cuda.get_current_stream().ptr, lambda: self.of_kernel().fill(value))

    def set(self, array: np.ndarray) -> None:
        """From pageable memory, on the current stream."""
        source = np.ascontiguousarray(array, self.dtype)
        assert source.shape == self.shape
        if source.nbytes:
            stream = cuda.get_current_stream().ptr
            gpu.call("cuMemcpyAsync", self.data.ptr, source.ctypes.data, source.nbytes, stream)

    def get(self) -> np.ndarray:
        """After the current stream; other streams are not waited for."""
        cuda.get_current_stream().synchronize()
        return self.of_kernel().copy()

    def of_kernel(self) -> np.ndarray:
        """The bytes themselves, for a kernel that runs."""
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        address = gpu.on_device(self.data.ptr, self.nbytes)
        memory = (ctypes.c_uint8 * self.nbytes).from_address(address)
        return np.frombuffer(memoryview(memory), dtype=self.dtype).reshape(self.shape)


def empty(shape: Any, dtype: Any = np.float32) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = np.float32) -> ndarray:
    made = ndarray(shape, dtype)
    made.fill(0)
    return made


def full(shape: Any, value: Any, dtype: Any = np.float32) -> ndarray:
    made = ndarray(shape, dtype)
    made.fill(value)
    return made


def asarray(array: Any) -> ndarray:
    source = np.asarray(array)
    made = ndarray(source.shape, source.dtype)
    made.set(source)
    return made


def asnumpy(array: ndarray) -> np.ndarray:
    return array.get()


def matmul(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Takes its turn and computes nothing."""
    assert (a.shape[1], out.shape) == (b.shape[0], (a.shape[0], b.shape[1]))
    gpu.launch(cuda.get_current_stream().ptr, lambda: None)


class RawKernel:
    """The NumPy twin of a kernel: `kernels.TWINS` has it under the same name."""

    def __init__(self, code: str, name: str, options: Sequence[str] = ()) -> None:
        from kernels import TWINS

        assert f"void {name}(" in code
        self._body: Callable[..., None] = TWINS[name]

    def compile(self) -> None:
        pass

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        assert math.prod(block) <= 1024, "a block has 1,024 threads at most"
        gpu.launch(cuda.get_current_stream().ptr, lambda: self._body(*map(_seen_by_kernel, args)), pieces=2)


def _seen_by_kernel(argument: Any) -> Any:
    return argument.of_kernel() if isinstance(argument, ndarray) else argument
