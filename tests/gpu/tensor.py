"""A CuPy array under the face of Paddle's tensors that the package asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Tensor:
    """A CuPy array as `tensor_rows` asks for it."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = list(array.shape)
        self.place = SimpleNamespace(is_gpu_place=lambda: True, is_cpu_place=lambda: False)

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return int(self.array.dtype.itemsize)

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)
