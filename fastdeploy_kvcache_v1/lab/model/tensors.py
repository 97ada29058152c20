"""Between paddle's tensors and NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle


def step_tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> Any:
    """A CPU tensor with a copy of `array`, of the same shape and dtype.

    `paddle.to_tensor` leaks a small list per call (seen with 3.3).
    """
    tensor = paddle.empty(array.shape, dtype=array.dtype.name)
    if array.size:
        tensor.get_tensor().set(np.ascontiguousarray(array), paddle.CPUPlace())
    return tensor


def as_array(tensor: Any, dtype: Any = np.float32) -> npt.NDArray[Any]:
    """A view of the memory of a contiguous CPU tensor of `dtype`, which keeps it alive."""
    return np.asarray(_Memory(tensor, dtype))


class _Memory:
    """NumPy's array interface. Its `from_dlpack` gives read-only arrays before 2.1."""

    def __init__(self, tensor: Any, dtype: Any) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": np.dtype(dtype).str,
            "data": (tensor.data_ptr(), False),
        }
