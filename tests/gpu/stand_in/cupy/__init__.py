"""A stand-in for the part of CuPy that this package and its GPU suite use, over the fake driver.

Who imports it has the fake driver in place of libcuda, too. An array is NumPy's, over the bytes of the device: only
what takes its turn on a stream is its own. A kernel is its NumPy twin.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_driver import ON_DEVICE
from fake_driver import current as gpu

from fastdeploy_kvcache_v1.worker.ops import driver

from . import cuda

driver.address_of = gpu.address_of
driver.driver.cache_clear()

__version__ = "14.0.0"

uint8, int32, int64, float16, float32, float64 = np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64


class ndarray(np.ndarray):
    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data + ON_DEVICE)

    def fill(self, value: Any) -> None:
        gpu.launch(cuda.get_current_stream().ptr, partial(self.view(np.ndarray).fill, value))

    def set(self, array: np.ndarray) -> None:
        """From pageable memory, on the current stream."""
        source = np.ascontiguousarray(array, self.dtype)
        assert source.shape == self.shape
        if source.nbytes:
            gpu.call("cuMemcpyAsync", self.data.ptr, source.ctypes.data, source.nbytes, cuda.get_current_stream().ptr)

    def get(self) -> np.ndarray:
        """After the current stream; other streams are not waited for."""
        cuda.get_current_stream().synchronize()
        return np.array(self)


def empty(shape: Any, dtype: Any = np.float32) -> ndarray:
    """Given back with the last view of it, without waiting for the device."""
    nbytes = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
    address = gpu.call("cuMemAlloc", max(1, nbytes))
    memory = gpu.bytes_of(address)
    weakref.finalize(memory, gpu.answer, "cuMemFree", address).atexit = False
    return memory[:nbytes].view(dtype).reshape(shape).view(ndarray)


def full(shape: Any, value: Any, dtype: Any = np.float32) -> ndarray:
    made = empty(shape, dtype)
    made.fill(value)
    return made


def zeros(shape: Any, dtype: Any = np.float32) -> ndarray:
    return full(shape, 0, dtype)


def asarray(array: Any) -> ndarray:
    made = empty(np.shape(array), np.asarray(array).dtype)
    made.set(array)
    return made


asnumpy = ndarray.get


def matmul(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Takes its turn and computes nothing."""
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
        given = [each.view(np.ndarray) if isinstance(each, ndarray) else each for each in args]
        gpu.launch(cuda.get_current_stream().ptr, partial(self._body, *given), pieces=2)
